"""The key of all that a pass of a model depends on, and the fingerprint of its weights."""

import hashlib
from collections.abc import Hashable
from functools import cache
from typing import Any, NamedTuple

import torch

from csd.engine.step.prefill import read_prompt
from csd.engine.step.step import Step
from csd.models.attributes import Attributes
from csd.models.fused.decoder import Decoder
from csd.models.lora import base_of
from csd.state.kv_cache import PAGE

# the first SAMPLED of each PERIOD words of 4 bytes of a large tensor are read
PERIOD, SAMPLED = 1024, 16
# words of tensors that are added up together, and largest number of rows of PERIOD numbers: enough
# for a tensor of 2^37 bytes
TOGETHER, ROWS = 1 << 20, 1 << 15
# tokens of the text whose logits are hashed for the fingerprint; they fit in a page
PROBE = 48


class ModelKey(NamedTuple):
    """Everything that a pass reads beside its text; equal keys mean equal passes."""

    state: Hashable
    sums: Hashable  # of the tensors' words


def model_state(model: Any, decoder: Any) -> Hashable:
    """Attributes of a model (`csd.models.attributes`), and addresses and versions of its tensors.

    model: the user's module. Without one, a fused decoder's own attributes, which are all that its
    pass reads; None for another decoder.
    """
    return None if (read := _read(model, decoder)) is None else _state(read, decoder, begun=False)


# a view of a tensor that was made in this mode is made in it too
@torch.inference_mode()
def model_key(model: Any, decoder: Any) -> ModelKey:
    """`model_state` as the run began, and sums of the words of a module's tensors, which
    optimizers may write unnoticed.

    Tensors of at most 4 KiB are read whole, and of others 64 bytes in 4096, in one copy to the
    host. Each word has a random weight by its place. So a training step or a permutation shows,
    but not every write through `.data` to a few numbers.
    """
    read = _read(model, decoder)
    if read is None:
        return ModelKey(None, None)
    state = _state(read, decoder, begun=True)
    if model is None:
        return ModelKey(state, None)
    by_device: dict[torch.device, _TensorWords] = {}
    # tied weights are read once
    for x in {id(x): x for x in read.tensors}.values():
        if x.layout == torch.strided and x.device.type != "meta" and x.numel():
            if x.device not in by_device:
                by_device[x.device] = _TensorWords(x.device)
            by_device[x.device].add(x.detach())
    return ModelKey(state, tuple(words.sums() for words in by_device.values()))


def _read(model: Any, decoder: Any) -> Attributes | None:
    if model is not None:
        return Attributes.of(base_of(model).modules(), getattr(decoder, "written", ()))
    return Attributes.of_object(decoder, ("tapped",)) if isinstance(decoder, Decoder) else None


def _state(read: Attributes, decoder: Any, begun: bool) -> Hashable:
    adapters = getattr(decoder, "adapters", None)
    active = adapters and (adapters.state if begun else adapters.now())
    return active, tuple(read.values), read.places


class _TensorWords:
    """Words of tensors on one device, from which `sums` makes wrapping sums on the host.

    A word has 32 bits. It is multiplied by random numbers of 64 bits by its place, so that tensors
    that differ in a word that is read have equal sums with a chance of 2^-32 (multilinear hashing).
    """

    def __init__(self, device: torch.device):
        self._random = _random(device)
        # words [P, SAMPLED] of periods of large tensors; words [N] of others and of remainders
        self._periods: list[torch.Tensor] = []
        self._rest: list[torch.Tensor] = []
        self._count = 0
        self._sums: list[torch.Tensor] = []

    def add(self, x: torch.Tensor) -> None:
        flat: Any = x.reshape(-1).view(torch.uint8)
        if flat.storage_offset() % 4:
            flat = flat.clone()
        whole = flat.numel() // 4 * 4
        words, tail = flat[:whole].view(torch.int32), flat[whole:]
        count = words.numel() // PERIOD if words.numel() > PERIOD else 0
        if count:
            self._periods.append(words[: count * PERIOD].view(-1, PERIOD)[:, :SAMPLED])
        self._rest += [part.int() for part in (words[count * PERIOD :], tail) if part.numel()]
        self._count += count * SAMPLED + PERIOD
        if self._count > TOGETHER:
            self._end()

    def _end(self) -> None:
        """Sum the words so far."""
        of_word, of_number, of_row = self._random
        parts = []
        if self._periods:
            # [P]; a cast apart is faster than one within the product
            parts.append((torch.cat(self._periods).long() * of_word).sum(1))
        if self._rest:
            parts.append(torch.cat(self._rest).long())
        for numbers in parts:
            padded = torch.nn.functional.pad(numbers, (0, -len(numbers) % PERIOD))
            rows = (padded.view(-1, PERIOD) * of_number).sum(1)
            self._sums.append((rows * of_row[: len(rows)]).sum())
        self._periods, self._rest, self._count = [], [], 0

    def sums(self) -> tuple[int, ...]:
        self._end()
        return tuple(torch.stack(self._sums).tolist()) if self._sums else ()


@cache
def _random(device: torch.device) -> list[torch.Tensor]:
    """Random numbers [SAMPLED], [PERIOD] and [ROWS] int64, the same in each process."""
    generator = torch.Generator().manual_seed(0)
    sizes = [SAMPLED, PERIOD, ROWS]
    numbers = torch.randint(-(2**63), 2**63 - 1, (sum(sizes),), generator=generator)
    return [*numbers.to(device).split(sizes)]


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
