"""Comparison of one call of a layer with a state between csd and the module's own function.

The text is random, in float32. Its first tokens are read as a prompt and the last ones as a chain
of nodes, beyond positions at which states are stored. The module's own pass over a short text would
not show a lost state.
"""

from types import SimpleNamespace
from typing import Any

import torch

from csd.kernels.ops import reference
from csd.kernels.states import StepStates
from csd.kernels.states.prompt import PromptStates
from csd.models.mixer_calls import MixerCall, answer
from csd.models.probe import NotAdmitted
from csd.models.redirect_mixers import CONVOLUTION
from csd.state.recurrent import ConvSize, StateMemory, StateSizes

# tokens of the prompt, which has a piece for the module's own function and a chunk after it; number
# of nodes
PROMPT, ROWS = 105, 6
# allowed difference, as a share of the largest number. References differ by 1e-6, and a GPU's
# kernels for prompts may round factors to ten bits; a lost or undecayed state gives 0.1 and more
OFF = 1e-2


def state_difference(call: MixerCall) -> float:
    """Largest difference as a share of the largest number. Raises NotAdmitted if too large."""
    assert call.own is not None
    given = _text(call)
    with torch.no_grad():
        whole = call.own(**given)
        want = _rows(call, whole)
        got = _by_csd(call, given)
    off = ((got - want).abs().max() / want.abs().max().clamp(min=1e-30)).item()
    # a NaN is not admitted either
    if not off <= OFF:
        raise NotAdmitted(
            f"{call.place} computes another function than {call}, which csd derived from its "
            f"call: results over {PROMPT + ROWS} tokens differ by {off:.2g} of the largest number"
        )
    return off


def _by_csd(call: MixerCall, given: dict[str, Any]) -> torch.Tensor:
    ops = reference()
    some: tuple = ((call.size,), ()) if isinstance(call.size, ConvSize) else ((), (call.size,))
    memory = StateMemory(StateSizes(*some), 1, 16, torch.float32, call.device)
    prompt = PromptStates(ops, memory, 0, PROMPT)
    first = _rows(call, answer(call, 0, call.own, _part(call, given, 0, PROMPT), prompt))
    prompt.end()

    def whole(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=call.device)

    pool = SimpleNamespace(
        slot=whole(*[0] * ROWS), position=whole(*range(PROMPT, PROMPT + ROWS)),
        ancestors=2 ** (torch.arange(ROWS, device=call.device) + 1) - 1,
        slot_start=whole(0), slot_nodes=whole(ROWS),
    )  # fmt: skip
    step = StepStates.of(ops, memory, pool)
    last = answer(call, 0, call.own, _part(call, given, PROMPT, PROMPT + ROWS), step)
    return torch.cat((first, _rows(call, last)))


def _rows(call: MixerCall, result: Any) -> torch.Tensor:
    """Result of a call as [T, ..] in float32."""
    result = result[0] if isinstance(result, tuple) else result
    return (result[0].T if call.function == CONVOLUTION else result[0]).float()


# arguments with one entry per token
OF_TEXT = ("hidden_states", "query", "key", "value", "g", "beta", "dt", "B", "C")


def _part(call: MixerCall, given: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    along = 2 if call.function == CONVOLUTION else 1
    return {
        name: x.narrow(along, first, last - first) if name in OF_TEXT else x
        for name, x in given.items()
    }


def _text(call: MixerCall) -> dict[str, Any]:
    """The recorded arguments, with random values for those that have one entry per token."""
    generator, found = torch.Generator().manual_seed(0), dict(call.named)
    for name, x in found.items():
        if not torch.is_tensor(x) or name not in OF_TEXT:
            # parameters; a rule's stay as they are: small, and in some families float32 already
            wide = torch.is_tensor(x) and x.is_floating_point() and call.function == CONVOLUTION
            found[name] = x.float() if wide else x
            continue
        shape = list(x.shape)
        shape[2 if call.function == CONVOLUTION else 1] = PROMPT + ROWS
        y = torch.randn(shape, generator=generator)
        # decays close to one, so that a state lasts
        y = -0.05 * y.abs() if name == "g" else y.sigmoid() if name == "beta" else y
        found[name] = y.to(call.device)
    return found
