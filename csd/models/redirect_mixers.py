"""Redirection of the functions that compute a module's layers with a state.

transformers' mixers call a few functions of their own file: a causal convolution, and the core of
the layer over many tokens. The first decoder of a module with mixers wraps each of these. In the
thread of a pass (`redirect_attention.calls_go_to`) the wrapper calls `answer`, elsewhere the file's
own function, which uses the kernels of flash-linear-attention, mamba-ssm or causal-conv1d if
transformers does.
"""

import inspect
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import nn

from csd.models import redirect_attention

CONVOLUTION = "causal_conv1d_fn"
# the cores that csd computes along trees: function of the file -> name of the method
CORES = {
    "torch_chunk_gated_delta_rule": "a gated delta rule",
    "mamba2_chunk_scan": "Mamba-2",
}
FUNCTIONS = (CONVOLUTION, *CORES)


def functions_of(module: str) -> set[str]:
    """Names in `FUNCTIONS` of functions that an imported file has."""
    return {name for name in FUNCTIONS if callable(vars(sys.modules[module]).get(name))}


def put_in_front(modules: Iterable[nn.Module]) -> None:
    """Wrap the functions in all files of these modules' classes, once per file."""
    for kind in {type(module) for module in modules}:
        for cls in kind.__mro__[:-1]:
            names = vars(sys.modules[cls.__module__])
            if not cls.__module__.startswith("transformers."):
                continue
            for name in FUNCTIONS:
                own = names.get(name)
                if callable(own) and not hasattr(own, "own_of_csd"):
                    names[name] = _in_front(name, own)


def _in_front(name: str, own: Callable) -> Callable:
    signature = inspect.signature(own)

    @wraps(own)
    def call(*args: Any, **named: Any) -> Any:
        answer = getattr(redirect_attention._thread, "answer", None)
        if answer is None:
            return own(*args, **named)
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        given = dict(bound.arguments)
        # a mixer passes on arguments that it does not use
        given |= given.pop("kwargs", {})
        return answer.mixer(name, own, given)

    call.own_of_csd = own  # type: ignore[attr-defined]
    return call


def is_convolution(model: nn.Module, name: str) -> bool:
    """True if the Conv1d `name` is part of a mixer, which reads its weight without calling it."""
    parent = model.get_submodule(name.rpartition(".")[0])
    files = {cls.__module__ for cls in type(parent).__mro__ if cls.__module__ in sys.modules}
    return any(
        file.startswith("transformers.") and CONVOLUTION in functions_of(file) for file in files
    )


def owner_of(model: nn.Module, weight: torch.Tensor) -> str:
    """Name of the module whose parameter shares memory with a convolution's weight."""
    for name, parameter in model.named_parameters():
        if parameter.data_ptr() == weight.data_ptr():
            return name.rpartition(".")[0]
    return "a convolution"
