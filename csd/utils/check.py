"""Checks of JSON values against a `TypedDict`:

    class Line(TypedDict):
        prompt_ids: list[Token]
        seed: NotRequired[int | None]

Extra keys are ignored. `shown` returns a value as an error shows it, `without_controls` a text of
others as a terminal may print it.
"""

import math
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)


@dataclass(frozen=True, slots=True)
class Between:
    """`Annotated[int, Between(0, 9)]`: both ends are allowed."""

    low: float
    high: float = math.inf

    def __str__(self) -> str:
        return f"from {self.low}" + (f" to {self.high}" if self.high < math.inf else " on")


@dataclass(frozen=True, slots=True)
class AtLeast:
    """`Annotated[list[int], AtLeast(1)]`: a list of at least one entry."""

    entries: int


Token = Annotated[int, Between(0, 2**31 - 1)]


def fits(value: Any, kind: Any) -> bool:
    return _check_of(kind)([value])


def check(value: Any, kind: Any) -> None:
    """Raises ValueError, naming the place, when a value read from JSON does not fit `kind`."""
    if not fits(value, kind):
        _explain(kind, value, "")


@cache
def _check_of(kind: Any) -> Callable[[list], bool]:
    """Predicate that all values of a list fit; by level, since a trace has millions of numbers."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda values: True
    if origin in (Annotated, NotRequired):
        inside = _check_of(args[0])
        rules = args[1:] if origin is Annotated else ()
        return lambda values: inside(values) and all(_follow(rule, values) for rule in rules)
    if origin in (Union, UnionType):
        return lambda values: all(any(fits(v, a) for a in args) for v in values)
    if origin is Literal:
        return lambda values: all(isinstance(v, type(args[0])) and v in args for v in values)
    if kind in _SCALARS:
        return _SCALARS[kind][1]
    if origin is list:
        inside = _check_of(args[0])
        return lambda values: _are(list, values) and inside(list(chain.from_iterable(values)))
    if origin is tuple:
        parts = list(map(_check_of, args))
        return lambda values: (
            _are(list, values)
            and all(len(v) == len(parts) for v in values)
            and all(part([v[i] for v in values]) for i, part in enumerate(parts))
        )
    if origin is dict:
        inside = _check_of(args[1])
        return lambda values: _are(dict, values) and inside([x for v in values for x in v.values()])
    if is_typeddict(kind):
        fields = {name: _check_of(hint) for name, hint in fields_of(kind).items()}
        needed = kind.__required_keys__
        return lambda values: (
            _are(dict, values)
            and all(needed <= v.keys() for v in values)
            and all(f([v[name] for v in values if name in v]) for name, f in fields.items())
        )
    raise TypeError(f"kind must consist of JSON types, got {kind!r}")


def fields_of(kind: Any) -> dict[str, Any]:
    """Name and type of each key of a `TypedDict`."""
    return get_type_hints(kind, include_extras=True)


def _are(kind: type, values: list) -> bool:
    # a subclass counts as another type, such as bool for int
    return set(map(type, values)) <= {kind}


def _numbers(values: list) -> bool:
    if not set(map(type, values)) <= {int, float}:
        return False
    return all(-1e300 < v < 1e300 for v in values)


def _texts(values: list) -> bool:
    # half of a surrogate pair is no text: it can neither be written nor tokenised
    return _are(str, values) and all(v.isascii() or not _HALF.search(v) for v in values)


_HALF = re.compile("[\ud800-\udfff]")
# JSON types: their names, and predicates that all values of a list are of them
_SCALARS: dict[Any, tuple[str, Callable[[list], bool]]] = {
    bool: ("true or false", partial(_are, bool)),
    int: ("a whole number", partial(_are, int)),
    float: ("a finite number", _numbers),
    str: ("a string", _texts),
    None: ("null", partial(_are, NoneType)),
    NoneType: ("null", partial(_are, NoneType)),
    dict: ("an object", partial(_are, dict)),
    list: ("a list", partial(_are, list)),
}


def _follow(rule: Any, values: list) -> bool:
    if isinstance(rule, Between):
        return not values or rule.low <= min(values) <= max(values) <= rule.high
    if isinstance(rule, AtLeast):
        return all(len(v) >= rule.entries for v in values)
    return True


def _explain(kind: Any, value: Any, where: str) -> None:
    """Raises ValueError at the innermost place of `value` that does not fit."""
    plain = _stripped(kind)
    if is_typeddict(plain) and isinstance(value, dict):
        missing = [name for name in fields_of(plain) if name in plain.__required_keys__ - {*value}]
        if missing:
            raise ValueError(f"must have {_joined(where, missing[0])!r}, got {shown(value)}")
    for path, inside, part in _parts(plain, value):
        if not fits(part, inside):
            _explain(inside, part, _joined(where, path))
    if where:
        raise ValueError(f"must have {_name(kind)} as {where!r}, got {shown(value)}")
    raise ValueError(f"must be {_name(kind)}, got {shown(value)}")


def _parts(kind: Any, value: Any) -> Iterator[tuple[str | int, Any, Any]]:
    """Place, kind and value of each part of a value."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        # parts exist for at most one of several kinds
        for kind in args:
            yield from _parts(_stripped(kind), value)
    elif origin is list and isinstance(value, list):
        yield from ((i, args[0], part) for i, part in enumerate(value))
    elif origin is tuple and isinstance(value, list) and len(value) == len(args):
        pairs = zip(args, value, strict=True)
        yield from ((i, inside, part) for i, (inside, part) in enumerate(pairs))
    elif origin is dict and isinstance(value, dict):
        yield from ((name, args[1], part) for name, part in value.items())
    elif is_typeddict(kind) and isinstance(value, dict):
        yield from ((n, hint, value[n]) for n, hint in fields_of(kind).items() if n in value)


def _stripped(kind: Any) -> Any:
    while get_origin(kind) in (Annotated, NotRequired):
        kind = get_args(kind)[0]
    return kind


def _joined(where: str, part: str | int) -> str:
    if isinstance(part, int):
        return f"{where}[{part}]"
    return f"{where}.{part}" if where else part


def _name(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        rules = [f"of at least {r.entries}" if isinstance(r, AtLeast) else str(r) for r in args[1:]]
        return " ".join([_name(args[0]), *rules])
    if origin is NotRequired:
        return _name(args[0])
    if origin in (Union, UnionType):
        return " or ".join(map(_name, args))
    if origin is Literal:
        return f"one of {', '.join(map(repr, args))}"
    if origin is tuple:
        return f"a list of {len(args)}"
    scalar = dict if is_typeddict(kind) else origin or kind
    return _SCALARS[scalar][0] if scalar in _SCALARS else "another value"


def shown(value: Any) -> str:
    if isinstance(value, dict | list) and len(value) > 8:
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a number with too many digits to show"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def without_controls(text: str) -> str:
    """A text whose control characters are shown as escapes, but for tabs and ends of lines.

    A terminal would obey a model's text, which can move the cursor, retitle the window or write to
    the clipboard.
    """
    return "".join(
        c
        if c in "\n\t" or not unicodedata.category(c).startswith("C") or c == "\u200d"
        else c.encode("unicode_escape", "backslashreplace").decode()
        for c in text
    )


def one_line(text: str) -> str:
    """A text without control characters, its lines joined by spaces."""
    return without_controls(" ".join(text.split("\n")))
