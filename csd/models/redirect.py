"""Redirection of a module's attention, and of its layers with a state, to csd during one pass.

    with calls_go_to(answer, parts): model(...)

transformers looks up an attention function by the name in the model's config, and a mask function
likewise. During the pass that name is `NAME`, and the function of that name calls `answer` in the
thread that began the pass. In any other thread, which may train the module meanwhile, it calls the
function that the config named before. Names and training flags are restored at the end of the pass,
also after an error.

Mixers (layers with a state) call a few functions of their own file: a causal convolution, and the
core of the layer over many tokens. The first decoder of a module with mixers wraps each of these
(`put_in_front`). In the thread of a pass the wrapper calls `answer`, elsewhere the file's own
function, which uses the kernels of flash-linear-attention, mamba-ssm or causal-conv1d if
transformers does.
"""

import inspect
import sys
import threading
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

NAME = "csd_rows"

_thread = threading.local()
# the names of configs outside of passes, by id, while a pass has replaced them
_replaced: dict[int, str] = {}
_locks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


class AttentionArgs(NamedTuple):
    """Arguments of one attention call of a module."""

    module: nn.Module
    query: torch.Tensor  # [B, H, M, D]
    key: torch.Tensor  # [B, K, T, D]
    value: torch.Tensor  # [B, K, T, Dv]
    mask: torch.Tensor | None
    named: dict[str, Any]


class PassAnswer(Protocol):
    """Interface of an object that computes the calls of a pass."""

    def attention(self, args: AttentionArgs) -> torch.Tensor: ...

    def mask(self, named: dict[str, Any]) -> torch.Tensor | None: ...

    def mixer(self, name: str, own: Callable, named: dict[str, Any]) -> Any: ...


class Parts:
    """The modules of a model and the configs that they read, listed once."""

    def __init__(self, model: nn.Module):
        # a weak reference to the model itself, whose lifetime its owner decides
        self._model = weakref.ref(model)
        self._below = list(model.modules())[1:]
        configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
        named = [c for c in configs if hasattr(c, "_attn_implementation_internal")]
        self.configs: list[Any] = list({id(c): c for c in named}.values())
        # two engines of one model take turns
        self.lock = _locks.setdefault(model, threading.RLock())

    @property
    def modules(self) -> list[nn.Module]:
        model = self._model()
        return self._below if model is None else [model, *self._below]


@contextmanager
def calls_go_to(answer: PassAnswer, parts: Parts) -> Iterator[None]:
    """Context: attention of the parts calls `answer`; training flags are off, as in `eval()`."""
    _register()
    with parts.lock:
        outer = getattr(_thread, "answer", None)
        names = [c._attn_implementation_internal for c in parts.configs]
        training = [module for module in parts.modules if module.training]
        try:
            for config, name in zip(parts.configs, names, strict=True):
                if name != NAME:
                    _replaced[id(config)] = name
                config._attn_implementation_internal = NAME
            for module in training:
                module.training = False
            _thread.answer = answer
            yield
        finally:
            _thread.answer = outer
            # one flag at a time: `train()` would set those of frozen parts too
            for module in training:
                module.training = True
            for config, name in zip(parts.configs, names, strict=True):
                config._attn_implementation_internal = name
                if name != NAME:
                    _replaced.pop(id(config), None)


def _stock_attention_name(config: Any) -> str:
    """Attention name of a config outside of passes."""
    # the pass of another thread may end between the two reads
    name = _replaced.get(id(config)) or getattr(config, "_attn_implementation_internal", None)
    return name if name and name != NAME else "sdpa"


def own_function(module: Any, named: dict[str, Any]) -> tuple[str, Callable]:
    """Name and function of the attention that a module's config names outside of passes.

    A flash or compiled kernel, which takes no mask of four dimensions, is replaced by PyTorch's
    attention, or by the family's own in Python if the call has a cap or sinks.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = _stock_attention_name(getattr(module, "config", None))
    # names in the files of its class and of the bases, whose own come first
    files = ChainMap(*(vars(sys.modules[c.__module__]) for c in type(module).__mro__[:-1]))
    eager = files.get("eager_attention_forward")
    if name not in ("eager", "sdpa"):
        scored = named.get("softcap") is not None or named.get("s_aux") is not None
        name = "eager" if scored else "sdpa"
    if name == "eager" and eager is not None:
        return name, eager
    return "sdpa", files.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)["sdpa"]


@cache
def _register() -> None:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _attention(
    module: Any,
    query: torch.Tensor,  # [B, H, M, D]
    key: torch.Tensor,  # [B, K, T, D]
    value: torch.Tensor,  # [B, K, T, Dv]
    attention_mask: torch.Tensor | None,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    answer: PassAnswer | None = getattr(_thread, "answer", None)
    if answer is not None:
        args = AttentionArgs(module, query, key, value, attention_mask, named)
        return answer.attention(args), None
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # another thread's call while a pass has replaced the name
    name = _stock_attention_name(getattr(module, "config", None))
    is_known = name in ALL_ATTENTION_FUNCTIONS
    stock = ALL_ATTENTION_FUNCTIONS[name] if is_known else own_function(module, {})[1]
    return stock(module, query, key, value, attention_mask, **named)


def _mask(*args: Any, **named: Any) -> torch.Tensor | None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    answer: PassAnswer | None = getattr(_thread, "answer", None)
    if answer is None or args:
        return ALL_MASK_ATTENTION_FUNCTIONS[_stock_attention_name(named.get("config"))](
            *args, **named
        )
    return answer.mask(named)


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
    files = {cls.__module__ for module in modules for cls in type(module).__mro__[:-1]}
    for file in files:
        names = vars(sys.modules[file])
        for name in FUNCTIONS if file.startswith("transformers.") else ():
            own = names.get(name)
            if callable(own) and not hasattr(own, "own_of_csd"):
                names[name] = _in_front(name, own)


def _in_front(name: str, own: Callable) -> Callable:
    signature = inspect.signature(own)

    @wraps(own)
    def call(*args: Any, **named: Any) -> Any:
        answer = getattr(_thread, "answer", None)
        if answer is None:
            return own(*args, **named)
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        # a mixer passes on arguments that it does not use
        arguments |= arguments.pop("kwargs", {})
        return answer.mixer(name, own, arguments)

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
