"""Checks of single arguments. Each raises TypeError or ValueError that names its argument.

`whole` and `boolean` declare options of a common kind, with the check and the parser of the kind.
"""

import os
from functools import partial
from typing import Any

import torch

from csd.engine.results.result import Samples, UntilRule
from csd.graph.prior import Prior
from csd.graph.registry import check_known
from csd.traces.history import History
from csd.utils.arguments import Option, check_flag, check_path, check_whole, takes
from csd.utils.check import shown

SAMPLES_EXPECTED = "must be a csd.History or a list of past samples (token ids, texts or Samples)"


def check_history(name: str, value: Any) -> Any:
    """Raises TypeError for a value that is not a history, ValueError for a closed one."""
    if isinstance(value, list | tuple | Samples):
        return value
    if not isinstance(value, History):
        raise TypeError(f"{name} {SAMPLES_EXPECTED}, got {type(value).__name__}")
    if value.closed:
        raise ValueError(f"{name} is closed; open it again with csd.History(path=...)")
    return value


def check_type(name: str, value: Any, kinds: tuple[type, ...], expected: str) -> Any:
    """Raises TypeError for a value that is not of `kinds`."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {expected}, got a {type(value).__name__}")
    return value


def check_drafter(name: str, value: Any) -> Any:
    """Raises TypeError or ValueError for an unknown drafter."""
    check_known(value)
    return value


def check_prior(name: str, value: Any) -> Prior | None:
    """Returns the prior of a call: a file's, a new one that learns for True, None for False.

    Raises TypeError for anything else than these and a `csd.Prior`; the errors of `Prior.load` for
    a file.
    """
    if isinstance(value, Prior):
        return value
    if isinstance(value, bool):
        return Prior(learn=True) if value else None
    if isinstance(value, str | os.PathLike):
        try:
            return Prior.load(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    raise TypeError(
        f"{name} must be a csd.Prior, the path of its file, True or None, got {shown(value)}"
    )


def check_function(name: str, value: Any, arguments: int, expected: str) -> Any:
    """Raises TypeError for a value that is not a function of `arguments` arguments."""
    # a class, as in until=csd.Vote, is callable, but it is not a function of samples
    served = takes(value, arguments) or (name == "until" and isinstance(value, UntilRule))
    if not served or isinstance(value, type):
        raise TypeError(f"{name} must be {expected}, got {shown(value)}")
    return value


def check_dtype(name: str, value: Any) -> torch.dtype:
    """Returns the dtype of a torch.dtype or of its name ("bfloat16").

    Raises TypeError or ValueError for anything else.
    """
    if not isinstance(value, str):
        return check_type(name, value, (torch.dtype,), "a torch.dtype or its name")
    dtype = getattr(torch, value.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} must be a torch.dtype or its name, got {value!r}")
    return dtype


def check_tokenizer(name: str, value: Any) -> Any:
    """Raises TypeError for an object without a tokenizer's methods; None is served."""
    reads = callable(value) and hasattr(value, "decode") and not isinstance(value, type)
    if value is not None and not reads:
        raise TypeError(f"{name} must be a tokenizer of transformers, got {shown(value)}")
    return value


def check_template(name: str, value: Any) -> dict[str, Any]:
    """Raises TypeError for anything but a dict with string keys."""
    check_type(name, value, (dict,), "a dict")
    if not all(isinstance(key, str) for key in value):
        raise TypeError(f"{name} must be a dict with strings as keys, got {shown(value)}")
    return value


def check_record(name: str, value: Any) -> Any:
    """Raises TypeError for a value that is no path, OSError if the file cannot be written."""
    check_path(name, value)
    folder = os.path.dirname(os.path.abspath(value))
    # fail now, not after sampling
    if os.path.isdir(value) or not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(f"{name} must be a file in a writable folder, got {value!r}")
    return value


def whole(
    default: int | None,
    help: str,
    *,
    low: int = 0,
    high: int | None = None,
    flag: Any = int,
    **more: Any,
) -> Option:
    """An option of a whole number in [low, high]."""
    return Option(default, help, partial(check_whole, low=low, high=high), flag, **more)


def boolean(default: bool | None, help: str, flag: Any = bool, **more: Any) -> Option:
    """An option that is True or False."""
    return Option(default, help, check_flag, flag, **more)
