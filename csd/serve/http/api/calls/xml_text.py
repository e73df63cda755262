"""Calls in the XML of Qwen3-Coder and Qwen3.5.

    <function=add><parameter=x>1</parameter></function>

A parameter's text has no type of its own, so the tool's schema decides: a string stays text, and
other types are JSON, or Python's spelling of it. A text that is of none of its types stays text.
"""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from csd.serve.http.api.calls.json_text import Call, behind_spaces, strict, value_at

_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>")
_END = re.compile(r"\s*</function>|(?=\s*</tool_call>)")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>")
_PARAMETER_END = re.compile(r"\s*</parameter>")
# an end tag within a value is text: another tag follows the one that ends it
_VALUE = re.compile(r"(.*?)</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>))", re.DOTALL)
# models leave out the end tag of the last one
_UNCLOSED = re.compile(r"(.*?)(?=\s*</function>)", re.DOTALL)

_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
_NAMES |= {dict: "object", list: "array"}
_PYTHON = {"true": True, "false": False, "none": None, "null": None}


def function_at(text: str, at: int, schemas: Mapping[str, Any]) -> tuple[Call | None, int] | None:
    """The call that begins at a place, and its end; None if there is none or it has no end.

    The call is None for a tool that is not one of `schemas`, JSON schemas of arguments by name.
    """
    begin = _FUNCTION.match(text, at)
    # most texts without an end are found here, and not by patterns that read to the text's end
    if begin is None or all(text.find(tag, at) < 0 for tag in ("</function>", "</tool_call>")):
        return None
    name, at = begin[1].strip(), begin.end()
    schema = schemas.get(name)
    members: dict[str, str] = {}
    while head := _PARAMETER.match(text, at):
        key, at = head[1].strip(), head.end()
        types = _types_of(schema, key)
        value = _json_at(text, at, types)
        if value is None:
            match = _VALUE.match(text, at) or _UNCLOSED.match(text, at)
            if match is None:
                return None
            value = _json_of(match[1].removeprefix("\n").removesuffix("\n"), types), match.end()
        members[key], at = value
    end = _END.match(text, at)
    if end is None:
        return None
    pairs = (f"{json.dumps(key, ensure_ascii=False)}: {x}" for key, x in members.items())
    call = name, "{" + ", ".join(pairs) + "}"
    return (call if name in schemas else None), end.end()


def _json_at(text: str, at: int, types: set[str]) -> tuple[str, int] | None:
    """A parameter's JSON, whose strings may have tags, and its end; None for other texts."""
    if not types - {"string"}:
        return None
    start = behind_spaces(text, at)
    try:
        value, end = value_at(text, start)
        close, source = _PARAMETER_END.match(text, end), strict(text[start:end])
    except ValueError:
        return None
    if close is None or not _fits(value, source, types):
        return None
    return source, close.end()


def _json_of(text: str, types: set[str]) -> str:
    """A parameter's text as JSON; a string if it is of none of the types.

    Python's spelling of a value is read too: templates write `True`, and models single quotes.
    """
    bare = text.strip()
    try:
        if types - {"string"}:
            value: Any = _PYTHON.get(bare.lower(), ...)
            value = ast.literal_eval(bare) if value is ... else value
            source = strict(json.dumps(value, ensure_ascii=False))
            # a number beyond a double, or no number
            value_at(source, 0)
            if _fits(value, source, types):
                return source
    # errors of Python's parser; a set or bytes are no JSON
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        pass
    return json.dumps(text, ensure_ascii=False)


def _fits(value: Any, source: str, types: set[str]) -> bool:
    """True if a value is no string in disguise: of types with strings, one of the others."""
    if isinstance(value, float) and not re.search(r"[.eE]", source):
        value = int(value)
    return "string" not in types or _NAMES.get(type(value)) in types - {"string"}


def _types_of(schema: Any, key: str) -> set[str]:
    """Names of the types of an object's member; "number" for whole ones too."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    of_key = properties.get(key) if isinstance(properties, dict) else None
    types = _types(of_key, schema, 0)
    return types | {"integer"} if "number" in types else types


def _types(schema: Any, root: Any, level: int) -> set[str]:
    # a reference may lead back to its own place
    if not isinstance(schema, dict) or level > 8:
        return set()
    declared = schema.get("type")
    names = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        names |= {name for name in declared if isinstance(name, str)}
    if names:
        return names
    if isinstance(schema.get("enum"), list):
        return {_NAMES.get(type(value), "string") for value in schema["enum"]}
    if "const" in schema:
        return {_NAMES.get(type(schema["const"]), "string")}
    inner = [one for key in ("anyOf", "oneOf", "allOf") for one in schema.get(key) or ()]
    if isinstance(pointer := schema.get("$ref"), str):
        inner.append(_at(root, pointer))
    return set().union(*(_types(one, root, level + 1) for one in inner))


def _at(root: Any, pointer: str) -> Any:
    """The value of a schema that a local reference `#/a/b` names; None without it."""
    for key in pointer.removeprefix("#").split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        root = root.get(key) if isinstance(root, dict) else None
    return root
