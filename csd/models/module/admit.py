"""Admission of a module: csd's results with it are compared with the module's own results.

**attention**: the result of each call, against the function that the module uses without csd, on
the same queries, keys and values and with the module's own mask, at lengths beyond the call's
window or chunk. Final logits would not show a window: the last rows of a short text see all of it.
**states**: the result of each call of a layer with a state, over a text that passes stored states.
**mixing**: rows of one sequence, while tokens and positions of the other rows change. If the rows
change, samples depend on each other, through convolutions, rotary embeddings by the longest
sequence, or activations scaled per tensor. The maximum counts; a median hides a few wrong rows.
**text**: the same rows against the module's own pass over the sequence alone, which shows positions
that differ from csd's. Below 32 bits the median counts, since rounding alone routes rows to other
experts; the comparisons of attention and states do not use final logits.
"""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch

from csd.kernels.attention.layer import LayerAttention
from csd.kernels.layers.quantized import unrounded
from csd.kernels.ops import reference
from csd.kernels.states import StepStates
from csd.models.module.compare import (
    attention_difference,
    normal_operands,
    state_difference,
    without_work,
)
from csd.models.module.decoder import ModuleDecoder
from csd.models.module.probe import NotAdmitted, refusing
from csd.state.kv_cache import KVCache
from csd.state.recurrent import StateMemory, checkpoint

# largest change of a row with the other rows, as a share of the largest number; key: whether the
# dtype has 32 bits. Measured are 4e-7 (attention: 1e-6), and 0.1 and more with a fault
MOVED = {True: 1e-3, False: 3e-2}
# the same against the module's own pass, whose products have other numbers of rows
OFF = {True: 1e-3, False: 0.15}
# rows of the three sequences, the second being compared, and padding rows after them
ROWS, PADDING = (5, 8, 6), 3
# rows of the second sequence's two paths: a tree, in which several rows share a position
PATHS = [0, 1, 2, 3, 4], [0, 1, 2, 5, 6, 7]


@dataclass(frozen=True, slots=True)
class Admission:
    """Largest measured differences, each as a share of the largest number of the result."""

    attention: float
    mixing: float
    text: float
    states: float = 0.0

    def __str__(self) -> str:
        states = f", states {self.states:.1e}" if self.states else ""
        return (
            f"attention {self.attention:.1e}{states}, other rows {self.mixing:.1e}, text "
            f"{self.text:.1e}"
        )


# quantised products round their rows, which makes any difference larger
@unrounded()
def admit(decoder: ModuleDecoder) -> Admission:
    """Compare csd's results with the module's own, then drop the recorded arguments of the calls.

    Raises NotAdmitted, which names the difference and its place.
    """
    try:
        attention = max(attention_difference(call) for call in decoder.calls)
    finally:
        normal_operands.cache_clear()
    # one call of each kind: calls that differ only in their tensors are computed alike
    kinds = {call.kind(): call for call in decoder.mixers}
    states = max(map(state_difference, kinds.values()), default=0.0)
    wide = decoder.dtype.itemsize >= 4
    tokens = _tokens(decoder.config.vocab, 0)
    first = _rows(decoder, tokens, far=False)
    if not first.isfinite().all():
        raise NotAdmitted(f"{decoder.config.family} returns logits that are not finite")
    moved = 0.0
    for seed in (1, 2):
        others = _tokens(decoder.config.vocab, seed)
        others[1] = tokens[1]
        moved = max(moved, _apart(_rows(decoder, others, far=True), first).max().item())
    if moved > MOVED[wide]:
        raise NotAdmitted(
            f"{decoder.config.family} returns other logits for a row (by {moved:.2g} of the "
            "largest) when the other rows of the pass change, so samples would depend on each "
            "other. Possible causes are layers with a state, and activations quantized with one "
            "scale for all rows"
        )
    alone = torch.cat([_alone(decoder, tokens[1][path]) for path in PATHS])
    off = _apart(torch.cat([first[path] for path in PATHS]), alone)
    text = (off.max() if wide else off.median()).item()
    if text > OFF[wide]:
        raise NotAdmitted(
            f"{decoder.config.family} returns other logits (by {text:.2g} of the largest) for the "
            "rows of a text than in a plain pass over the text: it does not take positions from "
            "position_ids, or it computes with other data than its rows"
        )
    for call in decoder.calls:
        call.named, call.mask_function = {}, None
    for mixer in decoder.mixers:
        mixer.named, mixer.own = {}, None
    return Admission(attention, moved, text, states)


def _tokens(vocab: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (n,), generator=generator) for n in ROWS]


def _apart(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """[R]: largest difference in each row, as a share of the largest number of y."""
    x, y = x.double(), y.double()
    return (x - y).abs().amax(-1) / y.abs().max().clamp(min=1e-30)


def _rows(decoder: ModuleDecoder, tokens: list[torch.Tensor], far: bool) -> torch.Tensor:
    """Logits [8, V] of the second sequence; far: the others' positions are at the context's end."""
    c, device, dtype = decoder.config, decoder.device, decoder.dtype
    shift = max(0, min(c.context - max(ROWS), 1 << 16)) if far else 0
    words = [2 ** (torch.arange(n) + 1) - 1 for n in ROWS]
    position = [torch.arange(n) + shift for n in ROWS]
    for path in PATHS:
        words[1][path] = torch.tensor([2**j for j in path]).cumsum(0)
        position[1][path] = torch.arange(len(path))
    rows, S = sum(ROWS) + PADDING, len(ROWS)
    start = [sum(ROWS[:s]) for s in range(S)]
    whole = partial(torch.tensor, dtype=torch.int32, device=device)

    def padded(parts: list[torch.Tensor], fill: int) -> torch.Tensor:
        return torch.cat([*parts, torch.full((PADDING,), fill)]).to(device)

    where = dict(
        prompt_pages=whole([[0]] * S),
        prompt_len=whole([0] * S),
        slot_pages=whole([[0]] * S),
        slot_len=whole([0] * S),
        slot=padded([torch.full((n,), s) for s, n in enumerate(ROWS)], -1).int(),
        ancestors=padded(words, 0),
        slot_start=whole(start),
        slot_nodes=whole(ROWS),
        group_start=whole([*start, sum(ROWS)]),
    )
    cache = KVCache(
        c, slots=1, pages=1, prompt_pages=1, slot_pages=1, rows=rows, dtype=dtype, device=device
    )
    positions, states = padded(position, 0).int(), None
    if c.states is not None:
        memory = StateMemory(c.states, S, rows, dtype, device)
        # reference implementations, since the backend is not chosen yet
        states = StepStates.of(reference(), memory, SimpleNamespace(**where, position=positions))
        # a far sequence follows a text that is not given here: set the checkpoint before it
        memory.base.copy_(checkpoint(whole([0] * S) + positions[start].int()))
    nodes = cache.node_k, cache.node_v
    attend = LayerAttention(
        without_work, *nodes, cache.k, cache.v, where, None, c.head_dim**-0.5, states=states
    )
    with refusing(decoder.base):
        logits = decoder.forward(padded(tokens, -1).int(), positions, attend, *nodes)
    return logits[start[1] : start[2]]


@torch.no_grad()
def _alone(decoder: ModuleDecoder, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] of one sequence from the module without csd, in evaluation mode."""
    training = [module for module in decoder.parts.modules if module.training]
    ids = tokens[None].to(decoder.device)
    position = torch.arange(ids.shape[1], device=ids.device)[None]
    with decoder.parts.lock:
        try:
            for module in training:
                module.training = False
            return decoder.run(ids, position, None)[0]
        finally:
            for module in training:
                module.training = True
