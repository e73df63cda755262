"""State of a model's weights, to detect that they changed, and their fingerprint."""

import hashlib
from collections.abc import Hashable
from typing import Any

import torch

from csd.engine.step.prefill import read_prompt
from csd.engine.step.step import Step
from csd.models.load import Loaded
from csd.state.kv_cache import PAGE
from csd.utils.torch_state import version_of

# of each PERIOD words of 8 bytes of a large tensor, the first SAMPLED are read
PERIOD, SAMPLED = 512, 8
# tokens of the text whose logits are hashed for the fingerprint; they fit in a page
PROBE = 48


def tensor_versions(loaded: Loaded, begun: bool = False) -> Hashable:
    """The active adapters, and addresses and versions of a module's tensors; None without a module.

    PyTorch counts a version up when it writes a tensor in place, but not for writes through `.data`
    or by foreign code. begun: use the adapters that were active when the run began.
    """
    module = loaded.current_module()
    if module is None:
        return None
    adapters = getattr(loaded.decoder, "adapters", None)
    active = adapters and (adapters.state if begun else adapters.now())
    return active, *((p.data_ptr(), version_of(p)) for p in module.parameters())


# a view of a tensor that was made in this mode is made in it too
@torch.inference_mode()
def weights_state(loaded: Loaded, begun: bool = False) -> Hashable:
    """`tensor_versions`, and sums of words of all tensors, which optimizers may write unnoticed.

    Tensors of at most 4 KiB are read whole, and of others 64 bytes in 4096, in one copy to the
    host. So a training step shows, but not every write through `.data` to a few numbers.
    """
    module = loaded.current_module()
    if module is None:
        return None
    sums = [s for x in (*module.parameters(), *module.buffers()) for s in _sums(x.detach())]
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for s in sums:
        by_device.setdefault(s.device, []).append(s)
    read = tuple(tuple(torch.stack(parts).tolist()) for parts in by_device.values())
    return tensor_versions(loaded, begun), read


def _sums(x: torch.Tensor) -> list[torch.Tensor]:
    """Wrapping sums of the words of a tensor, as int64 scalars."""
    if x.layout != torch.strided or x.device.type == "meta" or not x.numel():
        return []
    words: Any = x.reshape(-1).view(torch.uint8)
    whole = words.numel() // 8 * 8
    rest, words = words[whole:], words[:whole].view(torch.int64)
    periods = words.numel() // PERIOD * PERIOD if words.numel() > PERIOD else 0
    parts = [words[:periods].view(-1, PERIOD)[:, :SAMPLED], words[periods:], rest]
    return [part.sum(dtype=torch.int64) for part in parts if part.numel()]


@torch.no_grad()
def logits_digest(step: Step) -> str:
    """Digest of the bits of the last logits of a text whose tokens span the vocabulary.

    step: over new caches with a page of a prompt.
    """
    config = step.decoder.config
    count = min(PROBE, config.vocab, config.context, PAGE)
    tokens = torch.linspace(0, config.vocab - 1, count).round().int().tolist()
    step.drafting = False
    step.cache.take(step.cache.prompt_pages, 0, count)
    logits = step.decoder.logits(read_prompt(step, 0, tokens, 0)[-8:])
    bits = logits.contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(bits, digest_size=6).hexdigest()
