"""The engines that `csd.generate` keeps: one a model, as long as the model lives."""

import weakref
from typing import Any

import torch

from csd.engine import Engine

# one engine a model: by object, as long as the model lives, or by where it was loaded from
_by_model: "weakref.WeakKeyDictionary[Any, Engine]" = weakref.WeakKeyDictionary()
_by_name: dict[tuple, Engine] = {}


def release() -> None:
    """Drop the engines that `generate` keeps, with their caches and the models they loaded."""
    for engine in [*_by_model.values(), *_by_name.values()]:
        engine.release()
    _by_model.clear()
    _by_name.clear()


def engine_for(
    model: Any,
    *,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    **_: object,
) -> Engine:
    """The engine `generate` keeps for a model."""
    if isinstance(model, Engine):
        for name, value in (("device", device), ("dtype", dtype), ("revision", revision)):
            if value is not None:
                raise ValueError(f"{name} is set when the Engine is made, got {value!r}")
        return model
    options = dict(tokenizer=tokenizer, device=device, dtype=dtype, revision=revision)
    if isinstance(model, str) or hasattr(model, "__fspath__"):
        key = (str(model), revision, str(device), dtype)
        if key not in _by_name:
            _by_name[key] = Engine(model, **options)
        engine = _by_name[key]
    else:
        if model not in _by_model:
            _by_model[model] = Engine(model, **options)
        engine = _by_model[model]
    if tokenizer is not None:
        engine.tokenizer = tokenizer
    return engine
