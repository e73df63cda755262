"""Calls of a module's layers with a state: their sizes, and their results from csd.

A call is one of a modeling file's functions (`csd/models/redirect.py`) with its arguments by name,
over the rows of one sequence. A call with an argument that is not listed here is not admitted.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from csd.kernels.states import SSM, DeltaRule, StepStates
from csd.kernels.states.prompt import PromptStates
from csd.models.redirect import CONVOLUTION
from csd.state.recurrent import ConvSize, StateSize

MAX_WEIGHTS = 17
# arguments that do not change one sequence's rows, or that are handled below
KNOWN = {
    "causal_conv1d_fn": {"hidden_states", "weight", "bias", "activation"},
    "torch_chunk_gated_delta_rule": {
        "query",
        "key",
        "value",
        "g",
        "beta",
        "chunk_size",
        "initial_state",
        "output_final_state",
        "use_qk_l2norm_in_kernel",
    },
    "mamba2_chunk_scan": {
        "hidden_states",
        "dt",
        "A",
        "B",
        "C",
        "chunk_size",
        "D",
        "dt_bias",
        "initial_states",
        "dt_softplus",
        "dt_limit",
        "return_final_states",
    },
}


class OtherCall(ValueError):
    """A call that csd does not compute."""


@dataclass(slots=True)
class MixerCall:
    """A call in a pass of a module."""

    place: str  # name of the module
    function: str
    size: ConvSize | StateSize
    device: torch.device
    # the module's own function and its arguments, until the call is admitted
    own: Callable | None = None
    named: dict[str, Any] = field(default_factory=dict)

    def kind(self) -> tuple:
        """Key of a call's computation: function, sizes and arguments other than tensors."""
        plain = tuple((k, str(v)) for k, v in self.named.items() if not torch.is_tensor(v))
        return self.function, self.size, plain

    def __str__(self) -> str:
        return f"{self.place}: {self.function} of {self.size}"


def size_of(function: str, arguments: dict[str, Any]) -> ConvSize | StateSize:
    """Sizes of a call's convolution or state. Raises OtherCall, naming an unsupported argument."""
    for name, value in arguments.items():
        harmless = value is None or value is False or name in KNOWN[function]
        # arguments that transformers passes through all layers by name
        if not harmless and name not in ("use_cache", "output_router_logits"):
            raise OtherCall(f"{function} with {name}, which csd does not compute")
    if function == CONVOLUTION:
        weight = arguments["weight"]
        if arguments.get("activation") not in (None, "silu", "swish"):
            raise OtherCall(f"{function} with activation {arguments['activation']!r}, not silu")
        if not 2 <= weight.shape[1] <= MAX_WEIGHTS:
            raise OtherCall(f"{function} of {weight.shape[1]} weights, not 2 to {MAX_WEIGHTS}")
        return ConvSize(*weight.shape)
    state = arguments.get("initial_state", arguments.get("initial_states"))
    if state is not None:
        raise OtherCall(f"{function} that begins with a state of its own")
    if function == "mamba2_chunk_scan":
        x, B = arguments["hidden_states"], arguments["B"]
        if arguments.get("z") is not None:
            raise OtherCall(f"{function} with a gate")
        return StateSize(B.shape[2], x.shape[2], B.shape[3], x.shape[3])
    key, value = arguments["key"], arguments["value"]
    return StateSize(key.shape[2], value.shape[2], key.shape[3], value.shape[3])


def answer(
    call: MixerCall,
    index: int,
    own: Any,
    arguments: dict[str, Any],
    states: StepStates | PromptStates,
) -> Any:
    """Result of a call; index: its index among the convolutions or among the other calls."""
    if call.function == CONVOLUTION:
        return _convolution(index, own, arguments, states)
    if call.function == "mamba2_chunk_scan":
        return _ssm(index, own, arguments, states)
    return _delta_rule(index, own, arguments, states)


def _convolution(
    index: int, own: Any, arguments: dict[str, Any], states: StepStates | PromptStates
) -> torch.Tensor:
    # [1, C, R]
    x, weight, bias = arguments["hidden_states"], arguments["weight"], arguments["bias"]
    silu = arguments.get("activation") is not None
    rows, weight = x[0].T.contiguous(), weight.contiguous()
    if isinstance(states, PromptStates):

        def whole(text: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = own(text.T[None], weight, bias, arguments.get("activation"))
            return result[0].T

        return states.convolve(index, rows, weight, bias, silu, whole).T[None]
    y = states.convolve(index, rows.to(weight.dtype), weight, bias, silu)
    return y.to(x.dtype).T[None]


def _delta_rule(
    index: int, own: Any, arguments: dict[str, Any], states: StepStates | PromptStates
) -> tuple[torch.Tensor, None]:
    q, k, v, g, beta = (arguments[name][0] for name in ("query", "key", "value", "g", "beta"))
    normalize = bool(arguments.get("use_qk_l2norm_in_kernel"))

    def some(rows: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = (x[None, rows] for x in (q, k, v))
        out, state_after = own(
            *parts,
            g=g[None, rows],
            beta=beta[None, rows],
            initial_state=state.float(),
            output_final_state=True,
            use_qk_l2norm_in_kernel=normalize,
        )
        return out[0], state_after

    out = states.update(index, DeltaRule(q, k, v, g, beta, normalize, some))
    return out.to(q.dtype)[None], None


def _ssm(
    index: int, own: Any, arguments: dict[str, Any], states: StepStates | PromptStates
) -> torch.Tensor | tuple[torch.Tensor, None]:
    x, dt, B, C = (arguments[name][0] for name in ("hidden_states", "dt", "B", "C"))
    D, step = arguments["D"], dt
    if arguments.get("dt_bias") is not None:
        step = step + arguments["dt_bias"].to(step.dtype)
    if arguments.get("dt_softplus"):
        step = F.softplus(step)
    step = step.clamp(*arguments["dt_limit"])
    names = "chunk_size", "dt_bias", "dt_softplus", "dt_limit"
    own = partial(own, **{name: arguments[name] for name in names})

    def some(rows: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = (y[None, rows] for y in (x, dt))
        # the function's states have the dimension of values first
        out, state_after = own(
            *parts,
            arguments["A"],
            B[None, rows],
            C[None, rows],
            D=None,
            initial_states=state.float().transpose(2, 3).contiguous(),
            return_final_states=True,
        )
        return out[0], state_after.transpose(2, 3)

    out = states.update(index, SSM(x, step, arguments["A"], B, C, some))
    if D is not None:
        out = out + D[:, None].to(out.dtype) * x.to(out.dtype)
    # each family's function returns float32
    out = out[None]
    return (out, None) if arguments["return_final_states"] else out
