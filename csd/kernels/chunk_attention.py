"""Causal attention of a chunk of a prompt over the prompt so far.

    out[r, h] = sum over t <= start + r of softmax(scale * q[r, h] . k[t, h // (H / K)]) v[t, ..]

PyTorch's own attention computes it on every device: a prompt is read only once, and PyTorch's
kernels are hard to beat there.
"""

import torch
import torch.nn.functional as F
from torch.backends import cuda as backend

aten = torch.ops.aten


def attend_chunk(
    q: torch.Tensor,  # [R, H, D]
    k: torch.Tensor,  # [start + R, K, D]
    v: torch.Tensor,  # [start + R, K, D]
    start: int,
    scale: float,
) -> torch.Tensor:
    """Returns the attention [R, H, D] of rows r that are the prompt's tokens start + r."""
    rows, end = q.shape[0], k.shape[0]
    # [1, heads, tokens, D]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    mask = None
    if takes_flash(q, k, v):
        # its causal mask is aligned to the last query and the last key
        out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)[0]
        return out[0].transpose(0, 1)
    if start:
        # loads PyTorch's compiler, over a second: at the first long prompt, not at csd's import
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(rows, end)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=start == 0,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def takes_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """True if flash attention supports the operands, and so is called directly.

    PyTorch's own choice may be cuDNN's attention, which prepares for each new length.
    """
    if not q.is_cuda or q.shape[-1] % 8:
        return False
    return backend.can_use_flash_attention(backend.SDPAParams(q, k, v, None, 0.0, False, True))


def tokens_of(cache: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Tokens [tokens, K, D] of the pages in `table`, a view if a CPU's page ids are consecutive.

    The host reads the table only if the cache is on a CPU.
    """
    if cache.device.type == "cpu":
        ids = table.tolist()
        if ids == list(range(ids[0], ids[0] + len(ids))):
            return cache[ids[0] : ids[0] + len(ids)].flatten(0, 1)
    return cache.index_select(0, table).flatten(0, 1)
