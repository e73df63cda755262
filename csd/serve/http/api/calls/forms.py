"""Formats of calls, known by a word of the chat template or named by the server.

- hermes (Qwen 2.5 and 3): `<tool_call>{"name": .., "arguments": {..}}</tool_call>`
- qwen3_coder (Qwen3-Coder, Qwen3.5): `<tool_call><function=name><parameter=x>..</parameter>
  </function></tool_call>`, where models may leave out `<tool_call>`
- mistral: `[TOOL_CALLS][{"name": .., "arguments": {..}}]`, or `[TOOL_CALLS]name[ARGS]{..}`
- llama3_json: `{"name": .., "parameters": {..}}` as the text's beginning, several separated by `;`

The two formats with `<tool_call>` read each other's calls.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from csd.serve.http.api.calls.json_text import (
    Part,
    behind_spaces,
    call_of_object,
    members_at,
    objects_at,
)
from csd.serve.http.api.calls.xml_text import function_at
from csd.utils.check import shown

# parts of a text from a mark on, and the place behind them; None if no call can be read there
Found = tuple[list[Part], int] | None
Read = Callable[[str, int, Mapping[str, Any]], Found]


@dataclass(frozen=True, slots=True)
class Form:
    """A format of calls.

    marks: in front of calls, anywhere in a text. read: reads calls from the beginning of a mark on,
    or without one at the front of an answer. front: True if an answer, of which only the first
    characters may be known, may begin with a call that has no mark; None if all calls have one.
    """

    marks: tuple[str, ...]
    read: Read
    front: Callable[[str, Collection[str]], bool] | None = None


_TAGGED, _TAGGED_END = re.compile(r"\s*<tool_call>"), re.compile(r"\s*</tool_call>")


def _tagged(text: str, at: int, schemas: Mapping[str, Any]) -> Found:
    begin = _TAGGED.match(text, at)
    at = at if begin is None else begin.end()
    parts: list[Part] = []
    end = at
    while (function := function_at(text, end, schemas)) is not None:
        call, behind = function
        parts.append(text[end:behind] if call is None else call)
        end = behind
    objects = (parts, end) if parts else objects_at(text, at, schemas)
    if objects is None:
        return None
    parts, end = objects
    # a model may leave out the last one
    last = _TAGGED_END.match(text, end)
    return parts, end if last is None else last.end()


_MISTRAL, _LLAMA = "[TOOL_CALLS]", "<|python_tag|>"
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*(?=\{)")


def _mistral(text: str, at: int, schemas: Mapping[str, Any]) -> Found:
    marked = text.startswith(_MISTRAL, at)
    at += len(_MISTRAL) if marked else 0
    start = behind_spaces(text, at)
    if text.startswith("[", start) and not text.startswith(_MISTRAL, start):
        return objects_at(text, at, schemas, marked=marked)
    parts: list[Part] = []
    while (head := _NAMED.match(text, at)) is not None and (marked or head[1] in schemas):
        try:
            _, end = members_at(text, head.end())
        except ValueError:
            break
        members: dict[str, Any] = {"name": (head[1], ""), "arguments": ({}, text[head.end() : end])}
        call = call_of_object(members, schemas, marked=True)
        parts.append(text[at:end] if call is None else call)
        at, marked = end, False
    return (parts, at) if parts else None


def _front_mistral(answer: str, names: Collection[str]) -> bool:
    """Without the mark, a special token, a call is a list or begins with a tool's name."""
    return answer[:1] in ("", "[") or any(
        name.startswith(answer)
        or (answer.startswith(name) and answer[len(name) :].lstrip()[:1] in ("", "[", "{"))
        for name in names
    )


def _llama(text: str, at: int, schemas: Mapping[str, Any]) -> Found:
    marked = text.startswith(_LLAMA, at)
    at += len(_LLAMA) if marked else 0
    # a list is no call in this format
    if not text.startswith("{", behind_spaces(text, at)):
        return None
    return objects_at(text, at, schemas, between=";", marked=marked)


FORMS = {
    "mistral": Form((_MISTRAL,), _mistral, _front_mistral),
    "qwen3_coder": Form(("<tool_call>", "<function="), _tagged),
    "hermes": Form(("<tool_call>",), _tagged),
    "llama3_json": Form((_LLAMA,), _llama, lambda answer, names: answer[:1] in ("", "{")),
}
# words of the templates that have a format, in the order in which they are looked for
SIGNS = {
    "mistral": re.compile(r"\[TOOL_CALLS\]"),
    "qwen3_coder": re.compile(r"<parameter="),
    "hermes": re.compile(r"<tool_call>"),
    "llama3_json": re.compile(r"<\|python_tag\|>|Environment: ipython|\"parameters\":"),
}
# the format of a required choice: a grammar makes the whole answer a list of calls
LISTED = Form((), objects_at, lambda answer, names: True)
NONE = Form((), lambda text, at, schemas: None)

PARSERS = ("auto", "none", *FORMS)


def form_of(template: str) -> str | None:
    """Name of the format of a chat template; None if it shows none."""
    return next((name for name, sign in SIGNS.items() if sign.search(template)), None)


def check_parser(name: str, value: str) -> str:
    """Returns the name of a format of calls. Raises ValueError, naming the argument."""
    if value not in PARSERS:
        raise ValueError(f"{name} must be one of {', '.join(PARSERS)}, got {shown(value)}")
    return value
