"""Checks of single arguments. Each raises TypeError or ValueError that names its argument."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from csd.engine.results.result import Samples
from csd.engine.results.until import UntilRule
from csd.graph.drafter_registry import check_known
from csd.graph.prior import Prior
from csd.traces.history import History
from csd.utils.arguments import check_path, check_seed, takes
from csd.utils.check import shown

_EXPECTED = "must be a csd.History or a list of past samples (token ids, texts or Samples)"


def check_history(history: Any) -> None:
    """Raises TypeError for a value that is not a history, ValueError for a closed one."""
    if history is None or isinstance(history, list | tuple | Samples):
        return
    if not isinstance(history, History):
        raise TypeError(f"history {_EXPECTED}, got {type(history).__name__}")
    if history.closed:
        raise ValueError("history is closed; open it again with csd.History(path=...)")


def or_none(check: Callable[..., Any], name: str, **limits: Any) -> Callable[[Any], Any]:
    """Returns `check` extended to accept None; limits: passed on to `check`."""
    return lambda value: None if value is None else check(name, value, **limits)


def check_type(name: str, kinds: tuple[type, ...], expected: str, value: Any) -> None:
    """Raises TypeError, naming the argument, for a value that is neither None nor of `kinds`."""
    if value is not None and not isinstance(value, kinds):
        raise TypeError(f"{name} must be {expected}, got a {type(value).__name__}")


def check_drafter(value: Any) -> None:
    """Raises TypeError or ValueError, naming `drafter`, for an unknown drafter."""
    if value is not None:
        check_known(value)


def check_prior(value: Any) -> Prior | None:
    """Returns the prior of a call: a file's, a new one that learns for True, None for False.

    Raises TypeError, naming `prior`, for anything else than these and a `csd.Prior`; the errors of
    `Prior.load` for a file.
    """
    if isinstance(value, Prior):
        return value
    if value is None or isinstance(value, bool):
        return Prior(learn=True) if value else None
    if isinstance(value, str | os.PathLike):
        try:
            return Prior.load(value)
        except ValueError as error:
            raise ValueError(f"prior: {error}") from None
    raise TypeError(
        f"prior must be a csd.Prior, the path of its file, True or None, got {shown(value)}"
    )


def check_function(name: str, arguments: int, expected: str, value: Any) -> None:
    """Raises TypeError for a value that is not a function of `arguments` arguments."""
    # a class, as in until=csd.Vote, is callable, but it is not a function of samples
    served = takes(value, arguments) or (name == "until" and isinstance(value, UntilRule))
    if value is not None and (not served or isinstance(value, type)):
        raise TypeError(f"{name} must be {expected}, got {shown(value)}")


def check_dtype(value: Any) -> torch.dtype | None:
    """Returns the dtype of a torch.dtype, of its name ("bfloat16") or of None.

    Raises TypeError or ValueError, naming `dtype`, for anything else.
    """
    if not isinstance(value, str):
        check_type("dtype", (torch.dtype,), "a torch.dtype or its name", value)
        return value
    found = getattr(torch, value.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype must be a torch.dtype or its name, got {value!r}")
    return found


def check_tokenizer(value: Any) -> None:
    """Raises TypeError, naming `tokenizer`, for an object without a tokenizer's methods."""
    reads = callable(value) and hasattr(value, "decode") and not isinstance(value, type)
    if value is not None and not reads:
        raise TypeError(f"tokenizer must be a tokenizer of transformers, got {shown(value)}")


def check_template(value: Any) -> None:
    """Raises TypeError for anything but a dict with string keys."""
    check_type("chat_template_kwargs", (dict,), "a dict", value)
    if not all(isinstance(key, str) for key in value or ()):
        raise TypeError(
            f"chat_template_kwargs must be a dict with strings as keys, got {shown(value)}"
        )


check_device = partial(check_type, "device", (str, torch.device), "a name or a torch.device")
check_revision = partial(check_type, "revision", (str,), "a name")


def check_record(value: Any) -> None:
    """Raises TypeError for a value that is no path, OSError if the file cannot be written."""
    if value is None:
        return
    check_path("record", value)
    folder = os.path.dirname(os.path.abspath(value))
    # fail now, not after sampling
    if os.path.isdir(value) or not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(f"record must be a file in a writable folder, got {value!r}")


def check_seed_or_none(value: Any) -> int | None:
    """Apply `check_seed` unless the value is None."""
    return None if value is None else check_seed(value)
