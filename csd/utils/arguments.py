"""Checks of arguments that several functions take; each names the argument.

They return the value as a plain Python type: numpy's numbers are accepted, True and False are not
accepted as numbers.
"""

import inspect
import math
import os
from collections.abc import Collection, Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np

from csd.utils.check import shown

# largest signed integer of 32 bits
LARGEST = 2**31 - 1
# largest factor of logits by the penalty, and by the temperature: with both, logits up to 1e8 stay
# within the range of float32
STEEPEST = 1e15


def check_whole(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Raises TypeError or ValueError unless `value` is a whole number in [low, high]."""
    return _bounded(name, _integer(name, value, "a whole number"), low, high)


def check_seed(value: Any) -> int:
    """Raises TypeError or ValueError unless `value` is a whole number of 64 bits, as in torch."""
    return _bounded("seed", _integer("seed", value, "a whole number or None"), -(2**63), 2**64 - 1)


def check_budget(value: Any) -> str | int:
    """Raises TypeError or ValueError unless `value` is "auto" or a whole number from 0."""
    if isinstance(value, str) and value == "auto":
        return "auto"
    return _bounded("budget", _integer("budget", value, "'auto' or a whole number"), 0, None)


def check_flag(name: str, value: Any) -> bool:
    """Raises TypeError unless `value` is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")
    return bool(value)


def check_one_of(name: str, value: Any, names: Collection[str]) -> str:
    """Raises ValueError unless `value` is one of `names`."""
    if not isinstance(value, str) or value not in names:
        quoted = [*map(repr, names)]
        expected = " or ".join(quoted) if len(quoted) < 3 else f"one of {', '.join(quoted)}"
        raise ValueError(f"{name} must be {expected}, got {shown(value)}")
    return value


def check_number(
    name: str, value: Any, low: float, high: float = math.inf, above: bool = False
) -> float:
    """Raises TypeError or ValueError unless finite, in [low, high]; above: in (low, high]."""
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    if not is_real:
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    if not isinstance(value, int | float):
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    inside = low < value <= high if above else low <= value <= high
    if not inside or value == math.inf:
        bracket = "(" if above else "["
        end = f"{high:g}]" if high < math.inf else "inf)"
        raise ValueError(f"{name} must lie in {bracket}{low}, {end}, got {shown(value)}")
    return value


def check_temperature(value: Any, name: str = "temperature") -> float:
    """Raises TypeError or ValueError unless `value` is above 0 and can divide logits."""
    value = check_number(name, value, 0, STEEPEST, above=True)
    if value < 1 / STEEPEST:
        raise ValueError(f"{name} above 0 must be at least {1 / STEEPEST}, got {value}")
    return value


def check_ids(name: str, value: Any, max_count: int, vocab: int | None = None) -> list[int]:
    """At most `max_count` token ids: None is no id, a whole number one; or a list, array or tensor.

    Raises TypeError or ValueError for another value, and for an id outside of `vocab`.
    """
    if value is None:
        return []
    if hasattr(value, "tolist"):
        # numpy and torch
        value = value.tolist()
    if isinstance(value, Integral):
        value = [value]
    # an iterator could be read only once
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Collection):
        raise TypeError(f"{name} must be a list of token ids, got {shown(value)}")
    if len(value) > max_count:
        raise ValueError(f"{name} must have at most {max_count} token ids, got {len(value)}")
    ids = [_integer(name, i, "token ids") for i in value]
    for i in ids:
        if not 0 <= i <= LARGEST:
            raise ValueError(f"{name} must be token ids, got {shown(i)}")
        if vocab is not None and i >= vocab:
            raise ValueError(f"{name} must lie in the vocabulary of {vocab}, got {i}")
    return ids


def check_strings(name: str, value: Any) -> tuple[str, ...]:
    """Tuple of strings that are not empty: None is no string, a str is one.

    Raises TypeError or ValueError for another value.
    """
    if value is None:
        return ()
    if hasattr(value, "tolist"):
        # numpy
        value = value.tolist()
    if isinstance(value, str):
        value = (value,)
    if isinstance(value, bytes | bytearray | Mapping) or not isinstance(value, Collection):
        raise TypeError(f"{name} must be a string or a list of strings, got {shown(value)}")
    if any(not isinstance(s, str) or not s for s in value):
        raise ValueError(f"{name} must be non-empty strings, got {shown(value)}")
    return tuple(value)


def check_path(name: str, value: Any) -> None:
    """Raises TypeError or ValueError for a value that cannot be the name of a file."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} must be a path, got {shown(value)}")
    try:
        fits = value != "" and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise ValueError(f"{name} must be a path, got {shown(value)}")


def each(name: str, value: Any, expected: str) -> Iterator:
    """Iterator over `value`. Raises TypeError if it is not iterable."""
    try:
        return iter(value)
    except TypeError as error:
        raise TypeError(f"{name} must be {expected}, got {shown(value)}") from error


def takes(value: Any, arguments: int) -> bool:
    """True if `value` is callable with `arguments` arguments, or callable without a signature."""
    if not callable(value):
        return False
    try:
        inspect.signature(value).bind(*[None] * arguments)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def _integer(name: str, value: Any, expected: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be {expected}, got {shown(value)}")
    return int(value)


def _bounded(name: str, value: int, low: int, high: int | None) -> int:
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {shown(value)}")
    if high is not None and value > high:
        raise ValueError(f"{name} must be at most {high}, got {shown(value)}")
    return value
