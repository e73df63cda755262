"""Checks that rule a `transformers` model out for the fused decoder, and its sizes if none does.

`refuse_patched` refuses modules that compute other values than their class, and so than the fused
decoder. A hook, a replaced `forward`, another activation or another scale changes the logits of a
module but not its weights. Code is identified by the package of its file, since `functools.wraps`
copies names. The code of transformers, the wrappers of accelerate (precision, device) and of TRL (a
loss in chunks), and the kernels of csd and Liger compute the same values as the class.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from csd.kernels.layers.quantized import Quantized, QuantizedStack
from csd.models.fused.config import ModelConfig
from csd.models.fused.layer_parts import values
from csd.models.lora import (
    base_linear,
    base_of,
    is_lora,
    refuse_lora,
    tuner_layers,
    without_adapters,
)
from csd.models.refuse import refuse_absent, refuse_prompt_learning, refuse_sharded

_PACKAGES = (
    "transformers",
    "torch",
    "accelerate",
    "trl",
    "csd",
    "liger_kernel",
    "kernels",
    "fla",
    "causal_conv1d",
)
# hooks that let gradients reach the embedding, or record outputs, and change no value
_HOOKS = ("make_inputs_require_grad", "output_capturing_hook")
_HOOK_PACKAGES = (*_PACKAGES, "peft")
# functions of a modeling file that its classes call by name
_FUNCTIONS = (
    "apply_rotary_pos_emb",
    "rotate_half",
    "repeat_kv",
    "eager_attention_forward",
    "l2norm",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
)
_ADVICE = "which csd's fused decoder does not support; undo it, or pass the plain model"


def refuse_patched(model: Any, config: ModelConfig) -> None:
    """Raises TypeError or ValueError naming the module of `model` that was changed, and how."""
    hooks = nn.modules.module._global_forward_hooks | nn.modules.module._global_forward_pre_hooks
    _refuse_hooks("torch.nn (all modules)", _changing(hooks))
    # a text family (`.._text`) is in the file of its family, which may read images too
    family = config.family.removesuffix("_text")
    stock = f"transformers.models.{family}.modeling_{family}"
    for name, module in model.named_modules():
        _refuse_hooks(name or type(model).__name__, hooks_of(module))
        if is_lora(module) and "forward" in vars(module):
            raise TypeError(f"{name} has a replaced forward, {_ADVICE}")
    for name, module in without_adapters(model):
        name = name or type(model).__name__
        cls: Any = type(module)
        changed = _foreign_class(cls, cls.forward, cls.__call__, stock)
        if "forward" in vars(module):
            changed = changed or _foreign(module.forward, cls.forward)
        if changed:
            raise TypeError(f"{name} computes with {changed}, {_ADVICE}")
        if hasattr(module, "parametrizations"):
            raise TypeError(f"{name} has parametrizations, {_ADVICE}")
    for name, function in _functions(model, stock):
        if changed := _foreign(function):
            raise TypeError(f"{name} is {changed}, {_ADVICE}")
    for name, actual, wanted in values(model, config):
        if actual != wanted:
            raise ValueError(f"{name} must be {wanted}, as of its class and config, got {actual}")


def _refuse_hooks(name: str, hooks: Sequence[str]) -> None:
    if hooks:
        raise TypeError(f"{name} has a forward hook ({hooks[0]}), {_ADVICE}")


def _changing(hooks: dict) -> list[str]:
    """Names of the hooks that may change a value."""
    return [
        name
        for name, hook in ((_named(hook), hook) for hook in hooks.values())
        if not (any(k in name for k in _HOOKS) and _package(hook) in _HOOK_PACKAGES)
    ]


def hooks_of(module: nn.Module) -> tuple[str, ...]:
    """Names of a module's forward hooks that may change a value."""
    return (*_changing(module._forward_hooks), *_changing(module._forward_pre_hooks))


@cache
def _foreign_class(cls: Any, forward: Callable, call: Callable, stock: str) -> str | None:
    """Name of a class or method from outside the family's file and torch; None if there is none."""
    kind = next((c for c in cls.__mro__ if c.__module__ == stock or _is_library(c)), None)
    if kind is None:
        return f"a {cls.__qualname__}"
    if forward is not kind.forward or call is not kind.__call__:
        return f"the forward of a {cls.__qualname__}"
    own = inspect.unwrap(forward)
    # the forward of another class may be from the same package
    named = getattr(own, "__qualname__", "") == f"{kind.__name__}.forward"
    if kind.__module__ == stock and _package(own) == "transformers" and not named:
        return _named(own)
    return _foreign(forward) or _foreign(call)


def _is_library(cls: Any) -> bool:
    """True if a class is torch's, Liger's, or of transformers outside of the models."""
    package, _, rest = cls.__module__.partition(".")
    library = package == "torch" or (package == "transformers" and not rest.startswith("models."))
    # Module and PreTrainedModel are bases of every family
    is_base = cls.__name__ in ("Module", "PreTrainedModel")
    return (library and not is_base) or package == "liger_kernel"


def _foreign(function: Any, stock: Any = None) -> str | None:
    """Name of the first layer of a wrapped function that is from no known package, or None.

    stock: the function that must be the innermost one, unless kernels replace it.
    """
    while function is not stock:
        if isinstance(function, MethodType):
            function = function.__func__
            continue
        inner = _wrapped(function)
        if isinstance(function, partial):
            function = function.func
        package = _package(function)
        if package not in _PACKAGES:
            return _named(function)
        if inner is None:
            kernels = package in ("csd", "liger_kernel", "kernels")
            return None if stock is None or kernels else _named(function)
        function = inner
    return None


def _wrapped(function: Any) -> Any:
    """Function that a wrapper calls; None if it cannot be determined."""
    free = getattr(getattr(function, "__code__", None), "co_freevars", ())
    # TRL's wrapper is named after the class's forward and calls the module's
    if "original_forward" in free:
        return function.__closure__[free.index("original_forward")].cell_contents
    return getattr(function, "__wrapped__", None)


def _package(function: Any) -> str:
    """Package whose folder has the code of a function or callable object; "" if none does."""
    code = getattr(function, "__code__", None)
    if code is None:
        return type(function).__module__.partition(".")[0]
    for package in _HOOK_PACKAGES:
        module = sys.modules.get(package)
        folder = os.path.dirname(getattr(module, "__file__", None) or "")
        if folder and code.co_filename.startswith(folder + os.sep):
            return package
    return ""


def _named(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _functions(model: Any, stock: str) -> Iterator[tuple[str, Any]]:
    """Yield name and function of those that the modules' classes look up when they run."""
    modeling = sys.modules.get(stock)
    for name in _FUNCTIONS:
        if hasattr(modeling, name):
            yield f"{stock}.{name}", getattr(modeling, name)
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kind = getattr(model.config, "_attn_implementation", None)
    if kind in ALL_ATTENTION_FUNCTIONS:
        yield f"the attention {kind!r}", ALL_ATTENTION_FUNCTIONS[kind]


# suffixes of the names of layers that are parts of a fused product
_PRODUCTS = ("_proj", "lm_head", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def checked_config(model: nn.Module) -> ModelConfig:
    """The sizes of a model. Raises TypeError or ValueError if the fused decoder does not run it."""
    _refuse_wrapped(model)
    model = base_of(model)
    if not hasattr(model, "config"):
        raise TypeError(f"{type(model).__name__} is not a transformers model: it has no config")
    config = ModelConfig.from_transformers(model.config)
    if not hasattr(model, "lm_head"):
        raise TypeError(
            f"{type(model).__name__} has no lm_head; load the model with AutoModelForCausalLM"
        )
    _refuse_weights(model, config)
    _refuse_sizes(model, config)
    refuse_patched(model, config)
    if config.experts and model.device.type == "cuda" and model.dtype != torch.bfloat16:
        raise ValueError(
            f"experts in {model.dtype} on a GPU: their grouped product supports only bfloat16 there"
        )
    return config


def _refuse_wrapped(model: nn.Module) -> None:
    refuse_sharded(model)
    refuse_prompt_learning(model)
    for name, module in base_of(model).named_modules():
        if is_lora(module):
            refuse_lora(name, module)
        elif tuner_layers([module]):
            raise TypeError(
                f"{name} is a {type(module).__name__} of peft; csd's fused decoder supports only "
                "the LoRA of a Linear"
            )


def _refuse_sizes(model: Any, config: ModelConfig) -> None:
    # the embedding first, since that is the one that users resize
    shape = config.vocab, config.hidden
    for name in ("model.embed_tokens", "lm_head"):
        size = tuple(base_linear(model.get_submodule(name)).weight.shape)
        if size != shape:
            raise ValueError(
                f"{name}.weight must have the shape {shape} of the config's vocab_size and "
                f"hidden_size, got {size}"
            )


def _refuse_weights(model: nn.Module, config: ModelConfig) -> None:
    for name, module in without_adapters(model):
        if name.endswith(_PRODUCTS) and type(module) is not nn.Linear:
            raise TypeError(
                f"{name} is a {type(module).__name__}, not a plain Linear: quantised or wrapped "
                "weights are not supported; load the model in bfloat16, float16 or float32"
            )
    biased = ("q_proj", "k_proj", "v_proj") if config.qkv_bias else ()
    for name, module in without_adapters(model):
        if getattr(module, "bias", None) is not None and not name.endswith(biased):
            raise TypeError(f"{name} has a bias, which is not supported for {config.family}")
    for name, param in model.named_parameters():
        refuse_absent(name, param)
        if type(param.data) not in (torch.Tensor, Quantized, QuantizedStack):
            raise TypeError(
                f"{name} is a {type(param.data).__name__}; pass a model with plain local weights"
            )
        if param.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {param.dtype}: quantised weights are not supported")
    plain = [p for _, m in without_adapters(model) for p in m.parameters(recurse=False)]
    for what in ("device", "dtype"):
        kinds = sorted({str(getattr(p, what)) for p in plain})
        if len(kinds) > 1:
            raise TypeError(
                f"the weights have more than one {what}: {', '.join(kinds)}; load the model on one "
                "device and in one dtype"
            )
