"""Comparison of single calls of a module between csd and the module's own function, on random data.

**attention**: queries, keys and values are in float32 at least: the rounding of 16 bits would hide
a wrong border of a window. Two sizes of scores are tried. Scores of about 1 give every key a share,
which shows a border that is off by one; scores of about 6 reach the nonlinear part of a cap.
**states**: a text in float32. Its first tokens are read as a prompt and the last ones as a chain of
nodes, beyond positions at which states are stored. The module's own pass over a short text would
not show a lost state.
"""

from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch

from csd.kernels.attention.layer import LayerAttention, PromptAttention
from csd.kernels.attention.prompt import PromptChunk, PromptRows, prompt_attention
from csd.kernels.attention.reference import tree_attention_ref
from csd.kernels.ops import reference
from csd.kernels.states import StepStates
from csd.kernels.states.prompt import PromptStates
from csd.models.module.mixers import MixerCall, answer
from csd.models.module.probe import AttentionCall, NotAdmitted, by_own_function
from csd.models.redirect import CONVOLUTION, AttentionArgs
from csd.state.kv_cache import PAGE, pages_for
from csd.state.recurrent import ConvSize, StateMemory, StateSizes

# number of compared rows, a chain of nodes or a prompt's last tokens; number of committed keys
# right before them
ROWS, COMMITTED = 6, 9
# keys for a call without a window; keys beyond the window for a call with one
KEYS, BEYOND = 96, 12
# longer texts are tried with the query heads of a single key-value head
LONG = 8192
# standard deviation of the scores -> allowed difference, as a share of the largest number
SPREADS = {1.0: 3e-5, 6.0: 1e-3}


def attention_difference(call: AttentionCall) -> float:
    """Largest difference as a share of the largest number. Raises NotAdmitted if too large."""
    module, spec = call.module(), call.spec
    assert module is not None
    length = KEYS
    if spec.window is not None:
        length = spec.window + BEYOND
    if spec.chunk is not None:
        # the rows lie on both sides of a chunk's border
        length = spec.chunk + ROWS // 2
    length = max(length, COMMITTED + ROWS + 1)
    visible = _visible(call, length)
    worst = 0.0
    for spread, allowed in SPREADS.items():
        q, k, v = _operands(call, length, spread)
        query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
        with torch.no_grad():
            args = AttentionArgs(module, query, key, value, visible, call.named)
            want = by_own_function(args)[0]
            outputs = {
                "a step's rows": _of_step(call, q, k, v),
                "a prompt's tokens": _of_prompt(call, q, k, v),
            }
        for what, got in outputs.items():
            off = ((got - want).abs().max() / want.abs().max().clamp(min=1e-30)).item()
            worst = max(worst, off)
            # a NaN is not admitted either
            if not off <= allowed:
                raise NotAdmitted(
                    f"{call.place} computes another attention than {spec}, which csd derived from "
                    f"its call: results for {what} at {length} keys differ by {off:.2g} of the "
                    "largest number"
                )
    return worst


def _operands(
    call: AttentionCall, length: int, spread: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [ROWS, H, D], k [T, K, D] and v [T, K, Dv]."""
    spec = call.spec
    H, K = spec.heads, spec.kv_heads
    if length > LONG and call.named.get("s_aux") is None:
        H, K = H // K, 1
    # a sum of D products of two normal numbers has standard deviation sqrt(D)
    size = spread / (spec.scale * spec.head_dim**0.5)
    q, k, v = normal_operands(length, H, K, spec.head_dim, spec.value_dim, call.device)
    return q * size, k, v


@lru_cache(maxsize=4)
def normal_operands(
    length: int, H: int, K: int, D: int, Dv: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Standard normal q, k and v; cached, since drawing them takes longer than the attention."""
    generator = torch.Generator().manual_seed(length)
    shapes = (ROWS, H, D), (length, K, D), (length, K, Dv)
    q, k, v = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    return q, k, v


def _visible(call: AttentionCall, length: int) -> torch.Tensor:
    """Mask [1, 1, R, T] from the module's own mask function: True where a row sees a key."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=call.device)
    keys = torch.arange(length, device=call.device)
    assert call.mask_function is not None
    seen = call.mask_function(zero, zero, keys[None, None, -ROWS:, None], keys[None, None, None])
    return seen.expand(1, 1, ROWS, length).contiguous()


def _paged(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """The first `tokens` tokens of x [T, K, D] as pages [pages, 64, K, D], padded with NaN."""
    pages = x.new_full((max(1, pages_for(tokens)) * PAGE, *x.shape[1:]), float("nan"))
    pages[:tokens] = x[:tokens]
    return pages.unflatten(0, (-1, PAGE))


def _of_step(
    call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    prompt = k.shape[0] - ROWS - COMMITTED
    whole = partial(torch.tensor, dtype=torch.int32, device=q.device)
    # the prompt's pages, then the slot's
    keys, values = (
        torch.cat((_paged(x, prompt), _paged(x[prompt:], COMMITTED)))[None] for x in (k, v)
    )
    count = keys.shape[1]
    where = dict(
        prompt_pages=torch.arange(count - 1, dtype=torch.int32, device=q.device)[None],
        prompt_len=whole([prompt]),
        slot_pages=whole([[count - 1]]),
        slot_len=whole([COMMITTED]),
        slot=whole([0] * ROWS),
        ancestors=2 ** (torch.arange(ROWS, device=q.device) + 1) - 1,
        slot_start=whole([0]),
        slot_nodes=whole([ROWS]),
        group_start=whole([0, ROWS]),
    )
    node_k, node_v = (x[-ROWS:][None] for x in (k, v))
    attend = LayerAttention(
        without_work, node_k, node_v, keys, values, where, None, call.spec.scale
    )
    return attend(0, q, *_asked(call, k))


def _of_prompt(
    call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    start = k.shape[0] - ROWS
    keys, values = (_paged(x, k.shape[0])[None] for x in (k, v))
    node_k, node_v = (x[start:][None] for x in (k, v))
    pages = torch.arange(keys.shape[1], dtype=torch.int32, device=q.device)
    rows = PromptRows.of([PromptChunk(0, [0] * ROWS, start)], pages[None])
    attend = PromptAttention(prompt_attention, node_k, node_v, keys, values, rows, call.spec.scale)
    return attend(0, q, *_asked(call, k))


def _asked(call: AttentionCall, k: torch.Tensor) -> tuple:
    """Arguments of the call as the decoder passes them: scale, properties, sinks."""
    if call.spec.is_plain:
        return call.spec.scale, None, None
    sinks = call.named["s_aux"] if call.spec.sinks else None
    return None, call.spec.properties._replace(kv_heads=k.shape[1]), sinks


def without_work(*args: Any, work: None = None, **named: Any) -> torch.Tensor:
    """Reference tree attention for a step that has no work list."""
    return tree_attention_ref(*args, **named)


# tokens of the prompt, which has a piece for the module's own function and a chunk after it; number
# of nodes
PROMPT, NODES = 105, 6
# allowed difference, as a share of the largest number. References differ by 1e-6, and a GPU's
# kernels for prompts may round factors to ten bits; a lost or undecayed state gives 0.1 and more
OFF = 1e-2


def state_difference(call: MixerCall) -> float:
    """Largest difference as a share of the largest number. Raises NotAdmitted if too large."""
    assert call.own is not None
    arguments = _text(call)
    with torch.no_grad():
        want = _rows(call, call.own(**arguments))
        got = _by_csd(call, arguments)
    off = ((got - want).abs().max() / want.abs().max().clamp(min=1e-30)).item()
    # a NaN is not admitted either
    if not off <= OFF:
        raise NotAdmitted(
            f"{call.place} computes another function than {call}, which csd derived from its "
            f"call: results over {PROMPT + NODES} tokens differ by {off:.2g} of the largest number"
        )
    return off


def _by_csd(call: MixerCall, arguments: dict[str, Any]) -> torch.Tensor:
    ops = reference()
    some: tuple = ((call.size,), ()) if isinstance(call.size, ConvSize) else ((), (call.size,))
    memory = StateMemory(StateSizes(*some), 1, 16, torch.float32, call.device)
    prompt = PromptStates(ops, memory, 0, PROMPT)
    first = _rows(call, answer(call, 0, call.own, _part(call, arguments, 0, PROMPT), prompt))
    prompt.end()
    whole = partial(torch.tensor, dtype=torch.int32, device=call.device)
    pool = SimpleNamespace(
        slot=whole([0] * NODES),
        position=whole(range(PROMPT, PROMPT + NODES)),
        ancestors=2 ** (torch.arange(NODES, device=call.device) + 1) - 1,
        slot_start=whole([0]),
        slot_nodes=whole([NODES]),
    )
    step = StepStates.of(ops, memory, pool)
    last = answer(call, 0, call.own, _part(call, arguments, PROMPT, PROMPT + NODES), step)
    return torch.cat((first, _rows(call, last)))


def _rows(call: MixerCall, result: Any) -> torch.Tensor:
    """Result of a call as [T, ..] in float32."""
    result = result[0] if isinstance(result, tuple) else result
    return (result[0].T if call.function == CONVOLUTION else result[0]).float()


# arguments with one entry per token
OF_TEXT = ("hidden_states", "query", "key", "value", "g", "beta", "dt", "B", "C")


def _part(call: MixerCall, arguments: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    along = 2 if call.function == CONVOLUTION else 1
    return {
        name: x.narrow(along, first, last - first) if name in OF_TEXT else x
        for name, x in arguments.items()
    }


def _text(call: MixerCall) -> dict[str, Any]:
    """The recorded arguments, with random values for those that have one entry per token."""
    generator, arguments = torch.Generator().manual_seed(0), dict(call.named)
    for name, x in arguments.items():
        if not torch.is_tensor(x) or name not in OF_TEXT:
            # parameters; a rule's stay as they are: small, and in some families float32 already
            wide = torch.is_tensor(x) and x.is_floating_point() and call.function == CONVOLUTION
            arguments[name] = x.float() if wide else x
            continue
        shape = list(x.shape)
        shape[2 if call.function == CONVOLUTION else 1] = PROMPT + NODES
        y = torch.randn(shape, generator=generator)
        # decays close to one, so that a state lasts
        y = -0.05 * y.abs() if name == "g" else y.sigmoid() if name == "beta" else y
        arguments[name] = y.to(call.device)
    return arguments
