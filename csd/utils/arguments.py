"""Declarations of arguments (`Option`), and checks that several of them share.

A check names the argument, and returns the value as a plain Python type: numpy's numbers are
accepted, True and False are not accepted as numbers.
"""

import inspect
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from typing import Any, get_args, get_type_hints

import numpy as np

from csd.utils.check import shown

# largest signed integer of 32 bits
LARGEST = 2**31 - 1
# largest factor of logits by the penalty, and by the temperature: with both, logits up to 1e8 stay
# within the range of float32
STEEPEST = 1e15


@dataclass(frozen=True, slots=True)
class Switch:
    """A flag that sets its option to `value`; a `value` in words names the flag."""

    value: Any
    help: str

    def flag(self, name: str) -> str:
        """The flag of the option `name`; it begins with "--no-" if `value` is False."""
        words = self.value if isinstance(self.value, str) else name
        return ("--no-" if self.value is False else "--") + words.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Option:
    """One argument, beside its type. Its flags are "--" plus its name with hyphens, and `short`."""

    default: Any
    help: str
    # maps (name in errors, value) to the value to use; raises TypeError or ValueError
    check: Callable[[str, Any], Any] | None = None
    # parser on the command line: a function of the text, bool, list for a repeatable flag, or
    # switches to some of the option's values
    flag: Callable[[str], Any] | tuple[Switch, ...] | None = None
    short: str | None = None
    flag_help: str | None = None  # help on the command line, where `help` names Python's objects
    also: tuple[str, ...] = ()  # further flags, as other tools name it
    # value without one of the call or the generation config, which turns a filter or a rule off;
    # by default `default`
    off: Any = ...
    # name in transformers' generation config, whose value applies where the call has none
    config: str | None = None
    # transformers' processor and its attribute with the value: "TopPLogitsWarper.top_p"
    processor: str = ""
    # names in a request of `csd serve`, separated by spaces
    fields: str = ""

    def __post_init__(self) -> None:
        if self.off is ...:
            object.__setattr__(self, "off", self.default)


@cache
def options_of(kind: type) -> dict[str, tuple[Any, Option]]:
    """Type and `Option` of each argument of a TypedDict, in the order of their definition."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: get_args(hints[name])[:2] for name in kind.__annotations__}


def default_of(kind: type, name: str) -> Any:
    """Default of an argument of a TypedDict."""
    return options_of(kind)[name][1].default


def checked(kind: type, name: str, value: Any) -> Any:
    """Value to use for an argument of `kind`. None is served if the argument's type has it.

    Raises TypeError or ValueError.
    """
    hint, option = options_of(kind)[name]
    if option.check is None or (value is None and type(None) in get_args(hint)):
        return value
    return option.check(name, value)


def check_whole(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Raises TypeError or ValueError unless `value` is a whole number in [low, high]."""
    return _bounded(name, _integer(name, value, "a whole number"), low, high)


def check_seed(name: str, value: Any) -> int:
    """Raises TypeError or ValueError unless `value` is a whole number of 64 bits, as in torch."""
    return _bounded(name, _integer(name, value, "a whole number or None"), -(2**63), 2**64 - 1)


def check_budget(name: str, value: Any) -> str | int:
    """Raises TypeError or ValueError unless `value` is "auto" or a whole number from 0."""
    if isinstance(value, str) and value == "auto":
        return "auto"
    return _bounded(name, _integer(name, value, "'auto' or a whole number"), 0, None)


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


def check_temperature(name: str, value: Any) -> float:
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
