"""JSON that a model writes: values in its own spelling, calls as JSON objects.

Arguments go out as the model spelled them, because a parsed number loses digits. A line break in a
string becomes an escape, so that the arguments are strict JSON. Not JSON, so that its text stays
text, is a number beyond a double, NaN, half of a surrogate pair, and nesting that decoders refuse.
"""

import json
import math
import re
from collections.abc import Collection
from typing import Any

# name of a tool, and its arguments as JSON
Call = tuple[str, str]
# parts of a text in their order: its words, and calls
Part = str | Call

# levels of objects and lists: decoders of clients end at some hundreds
DEEPEST = 128

_SPACE = re.compile(r"[ \t\n\r]*")
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]}]', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")


def behind_spaces(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def value_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at a place, and its end. Raises ValueError.

    Strings may have control characters, which `strict` escapes.
    """
    try:
        return _decoder.raw_decode(text, at)
    except RecursionError as error:
        raise ValueError("too many levels") from error


def members_at(text: str, at: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """The members of the JSON object that begins at a place, and its end. Raises ValueError.

    Each has its value and its own text. The last of equal names counts.
    """
    if not text.startswith("{", at):
        raise ValueError("no object")
    members: dict[str, tuple[Any, str]] = {}
    at = behind_spaces(text, at + 1)
    if text.startswith("}", at):
        return members, at + 1
    while True:
        name, at = value_at(text, at)
        at = behind_spaces(text, at)
        if not isinstance(name, str) or not text.startswith(":", at):
            raise ValueError("no member")
        start = behind_spaces(text, at + 1)
        value, at = value_at(text, start)
        members[name] = value, text[start:at]
        at = behind_spaces(text, at)
        if text.startswith("}", at):
            return members, at + 1
        if not text.startswith(",", at):
            raise ValueError("no end of the object")
        at = behind_spaces(text, at + 1)


def strict(source: str) -> str:
    """The text of a value that `value_at` has read, as strict JSON. Raises ValueError."""
    depth = 0

    def checked(match: re.Match[str]) -> str:
        nonlocal depth
        token = match[0]
        if token[0] != '"':
            depth += 1 if token in "[{" else -1
            if depth > DEEPEST:
                raise ValueError("too many levels")
            return token
        # half of a surrogate pair has no UTF-8
        (json.loads(token, strict=False) if "\\u" in token else token).encode()
        return _CONTROL.sub(lambda control: json.dumps(control[0])[1:-1], token)

    return _TOKEN.sub(checked, source)


def call_of_object(
    members: dict[str, tuple[Any, str]], names: Collection[str], marked: bool
) -> Call | None:
    """The call that an object's members are; None for an object that is no call of these tools.

    The arguments may be named parameters, null, or a string that holds their JSON.

    marked: True behind a mark, where a call may have no arguments at all.
    """
    name = members.get("name", (None, ""))[0]
    if not isinstance(name, str) or name not in names:
        return None
    keys = [key for key in ("arguments", "parameters") if key in members]
    if not keys and not marked:
        return None
    value, source = members[keys[0]] if keys else (None, "")
    try:
        if isinstance(value, str):
            source = value.strip()
            value, end = value_at(source, 0) if source else (None, 0)
            if end < len(source):
                return None
        if value is None:
            return name, "{}"
        return (name, strict(source)) if isinstance(value, dict) else None
    except ValueError:
        return None


def objects_at(
    text: str, at: int, names: Collection[str], *, between: str = "", marked: bool = True
) -> tuple[list[Part], int] | None:
    """Calls as JSON objects one after another, or as a list of them, and their end.

    None if no object begins at the place. An object that is no call of these tools is a part as it
    is written, and so is the rest of a list behind one that is no JSON.

    between: a character that may stand between objects. marked: as in `call_of_object`.
    """
    at = start = behind_spaces(text, at)
    listed = text.startswith("[", at)
    if listed:
        at, between = behind_spaces(text, at + 1), ","
    parts: list[Part] = []
    end = start
    while True:
        try:
            members, behind = members_at(text, at)
        except ValueError:
            break
        call = call_of_object(members, names, marked)
        parts.append(text[at:behind] if call is None else call)
        end, at = behind, behind_spaces(text, behind)
        if listed and text.startswith("]", at):
            return parts, at + 1
        if between and text.startswith(between, at):
            at = behind_spaces(text, at + 1)
        elif listed:
            break
    return (parts, end) if parts else None


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError("a number beyond a double")
    return number


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


_decoder = json.JSONDecoder(
    parse_float=_finite, parse_int=_finite, parse_constant=_no_constant, strict=False
)
