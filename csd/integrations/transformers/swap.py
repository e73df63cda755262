"""csd's RMS norm, rotary embedding and SwiGLU inside a stock `transformers` model.

    csd.apply_kernels(model)     # in place; further calls change nothing
    csd.remove_kernels(model)    # restores the stock layers

Each module gets its own `forward`; classes, weights and other models do not change.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from csd.kernels.layers.rms_norm import rms_norm
from csd.kernels.layers.rotary import rotate
from csd.kernels.layers.swiglu import silu_mul

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
ROTARY = "apply_rotary_pos_emb"


def apply_kernels(model: nn.Module) -> bool:
    """Swap csd's kernels into a Llama, Mistral, Qwen2 or Qwen3 of transformers.

    Returns True, also where an earlier call has swapped them in. CPU tensors run the loop of
    the backend "cpu" or the reference, CUDA tensors Triton kernels. All have a backward. Raises
    TypeError for a model with none of those layers, or with ones that csd cannot replace.
    """
    _check_model(model)
    every = ((m, _forward_for(m)) for m in model.modules())
    swapped = [(m, forward) for m, forward in every if forward is not None]
    if not swapped:
        raise TypeError(
            f"model must have layers of {', '.join(FAMILIES.values())} as transformers defines "
            f"them, got {type(model).__name__}"
        )
    swapped = [(m, forward) for m, forward in swapped if not _is_swapped(m)]
    for module, _ in swapped:
        if "forward" in vars(module):
            raise TypeError(
                f"a {type(module).__name__} already has a replaced forward (offloading, or "
                "kernels of another library); remove that first"
            )
    for module, forward in swapped:
        # a bound method is pickled as an attribute of the module, which does not exist there
        module.forward = functools.partial(forward, module)
    return True


def remove_kernels(model: nn.Module) -> bool:
    """Restore the stock layers that `apply_kernels` replaced.

    Returns True if there were any. Raises TypeError if `model` is not a module.
    """
    _check_model(model)
    swapped = [m for m in model.modules() if _is_swapped(m)]
    for module in swapped:
        del module.forward
    return bool(swapped)


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a model of transformers, got {type(model).__name__}: csd's own "
            "engines already have these kernels"
        )


def _is_swapped(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "func", None) in _FORWARDS


def _forward_for(module: Any) -> Callable | None:
    """csd's forward for a module, or None if csd does not replace it."""
    cls: Any = type(module)
    folder = cls.__module__.removeprefix("transformers.models.").partition(".")[0]
    name = FAMILIES.get(folder)
    if cls.__module__ != f"transformers.models.{folder}.modeling_{folder}" or name is None:
        return None
    if cls.__name__ == f"{name}RMSNorm":
        return _norm_forward
    if cls.__name__ == f"{name}MLP":
        if module.config.hidden_act not in ("silu", "swish"):
            raise TypeError(f"hidden_act must be silu, got {module.config.hidden_act!r}")
        return _mlp_forward
    if cls.__name__ == f"{name}Attention":
        # raises now if the class cannot be replaced
        _rotating_forward(cls)
        return _attention_forward
    return None


def _norm_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    weight, eps = self.weight, self.variance_epsilon
    if weight.dtype == hidden_states.dtype:
        return rms_norm(hidden_states, weight, eps)[0]
    # under autocast, the norm is cast back to the input's dtype, then multiplied by the weight in
    # the wider of their dtypes
    one = torch.ones_like(weight, dtype=hidden_states.dtype, requires_grad=False)
    return weight * rms_norm(hidden_states, one, eps)[0]


def _mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x)))


def _attention_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _rotating_forward(type(self))(self, *args, **kwargs)


# forward of each attention class with csd's rotary embedding. torch.compile can read a dict, but
# traces through functools.cache into the construction of the function, and fails
_rotating: dict[type, Callable] = {}
_FORWARDS = (_norm_forward, _mlp_forward, _attention_forward)


def _rotating_forward(cls: Any) -> Callable:
    """Copy of the class's forward whose global name of the rotary embedding refers to csd's."""
    # a model unpickled in a process without `apply_kernels` first gets here in its forward
    if cls in _rotating:
        return _rotating[cls]
    stock = cls.forward
    if ROTARY not in stock.__code__.co_names:
        raise TypeError(
            f"{cls.__name__}.forward does not call {ROTARY} in this version of transformers"
        )
    names = {**stock.__globals__, ROTARY: _rotary}
    forward = types.FunctionType(
        stock.__code__, names, stock.__name__, stock.__defaults__, stock.__closure__
    )
    forward.__kwdefaults__ = stock.__kwdefaults__
    return _rotating.setdefault(cls, forward)


def _rotary(
    q: torch.Tensor,  # [B, H, T, D]
    k: torch.Tensor,  # [B, K, T, D]
    cos: torch.Tensor,  # [B or 1, T, D]
    sin: torch.Tensor,  # [B or 1, T, D]
) -> tuple[torch.Tensor, torch.Tensor]:
    B, _, T, D = q.shape
    # under autocast the tables are wider than the projections, and so is the result
    dtype = torch.promote_types(q.dtype, cos.dtype)
    # views: the projections' memory is [B, T, heads, D]
    rows = (x.to(dtype).transpose(1, 2).reshape(B * T, -1, D) for x in (q, k))
    tables = (x.to(dtype).expand(B, T, D).reshape(B * T, D) for x in (cos, sin))
    rotated = rotate(*rows, *tables)
    q, k = (x.view(B, T, -1, D).transpose(1, 2) for x in rotated)
    return q, k
