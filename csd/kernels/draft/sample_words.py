"""Noise words that verification will sample with, for drafters on the device that couple to them.

    word[f, w] = philox(key[s], token[f, w], position[f], sample[s], SAMPLE),    s = slot[f]

position is the index of the generated token, from 0. Verification draws with the same words
(`csd/kernels/common/noise.py`).
"""

import torch

from csd.kernels.common.noise import SAMPLE, philox_words_ref
from csd.kernels.common.operator import operator
from csd.state.record import check_tensor

BLOCK = 128


def sample_words_ref(
    key: torch.Tensor,  # [S] int64
    sample: torch.Tensor,  # [S] int32
    slot: torch.Tensor,  # [F] int32
    position: torch.Tensor,  # [F] int32
    token: torch.Tensor,  # [F, W] int32
) -> torch.Tensor:
    """Returns the words [F, W] int64, in [0, 2^32)."""
    s, column = slot.long(), position[:, None].long()
    return philox_words_ref(key[s, None], token.long(), column, sample[s, None].long(), SAMPLE)


def sample_words_triton(
    key: torch.Tensor,
    sample: torch.Tensor,
    slot: torch.Tensor,
    position: torch.Tensor,
    token: torch.Tensor,
) -> torch.Tensor:
    """One launch."""

    import triton

    from csd.kernels.draft.triton.slots import sample_words_kernel

    F, W = token.shape
    word = torch.empty(token.shape, dtype=torch.int64, device=token.device)
    if word.numel():
        sample_words_kernel[(F, triton.cdiv(W, BLOCK))](
            key_ptr=key,
            sample_ptr=sample,
            slot_ptr=slot,
            position_ptr=position,
            token_ptr=token,
            word_ptr=word,
            W=W,
            SAMPLE=SAMPLE,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return word


_sample_words = operator(
    "sample_words",
    sample_words_ref,
    sample_words_triton,
    fake=lambda key, sample, slot, position, token: token.new_empty(token.shape, dtype=torch.int64),
)


def sample_words(
    key: torch.Tensor,
    sample: torch.Tensor,
    slot: torch.Tensor,
    position: torch.Tensor,
    token: torch.Tensor,
) -> torch.Tensor:
    """Returns words [F, W] int64 of tokens [F, W] >= 0 at positions [F] of slots [F] in 0..S-1.

    key: [S] int64 and sample: [S] int32, as `Slots` has them; the others are int32.
    """
    device = token.device
    check_tensor("key", key, (None,), torch.int64, device)
    check_tensor("sample", sample, key.shape, torch.int32, device)
    check_tensor("token", token, (None, None), torch.int32, device)
    for name, x in (("slot", slot), ("position", position)):
        check_tensor(name, x, token.shape[:1], torch.int32, device)
    return _sample_words(key, sample, slot, position, token)
