"""Modules that wrap a model without changing what it computes: compiled, replicated, averaged."""

from typing import Any

# packages whose wrappers with a child `module` compute what that child computes
_PACKAGES = ("torch", "deepspeed")


def unwrapped(model: Any) -> Any:
    """The model inside the wrappers of torch.compile, data parallelism and weight averages."""
    while (inner := _within(model)) is not None:
        model = inner
    return model


def _within(model: Any) -> Any:
    children = getattr(model, "_modules", None)
    if not isinstance(children, dict):
        return None
    if "_orig_mod" in children:
        return children["_orig_mod"]
    package = type(model).__module__.partition(".")[0]
    return children.get("module") if package in _PACKAGES else None
