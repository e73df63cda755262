"""Calls of a client's tools: read from the model's text, or made sure of by a grammar.

With `tool_choice` "auto" the model writes calls in the format of its chat template, and text that
is no such call stays text. A named choice makes the text the arguments of that tool, by its JSON
schema as grammar, and "required" a list of calls.

Formats, known by a word of the template, or named by the server (`--tool-call-parser`):

- Hermes and Qwen: `<tool_call>{"name": .., "arguments": {..}}</tool_call>` behind some text
- Mistral: `[TOOL_CALLS][{"name": .., "arguments": {..}}]`, or `[TOOL_CALLS]name[ARGS]{..}`
- Llama 3: `{"name": .., "parameters": {..}}` as the whole text, several separated by `;`
"""

import json
import re
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from csd.engine.options.thinking import after_thoughts
from csd.serve.http.errors import Refused
from csd.utils.check import shown

# fields that a named or required choice sets itself
GRAMMARS = ("response_format", "regex", "grammar")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")

# name of a tool, and its arguments as JSON
Call = tuple[str, str]
Certain = Callable[[str, Collection[str]], int]


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools that a request's choices may call.

    schemas: of their arguments, by name. choice: "auto", "required", or the name of a tool.
    form: format of the template's calls, a key of FORMS; None: only a grammar makes calls.
    single: True limits "required" to one call.
    """

    schemas: dict[str, Any]
    choice: str
    form: str | None
    single: bool = False

    @property
    def schema(self) -> Any:
        """JSON schema that the text must fit; None for "auto"."""
        if self.choice == "auto":
            return None
        if self.choice != "required":
            return self.schemas[self.choice]
        definitions: dict[str, Any] = {}
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    "arguments": _with_own_names(schema, f"{i}_", definitions),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for i, (name, schema) in enumerate(self.schemas.items())
        ]
        whole: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        if self.single:
            whole["maxItems"] = 1
        return whole | ({"$defs": definitions} if definitions else {})

    def read(self, text: str) -> tuple[str | None, list[Call]]:
        """Content and calls of a whole text; text that is no call is content."""
        if self.choice in self.schemas:
            # a text that was cut has the beginning of the arguments
            return None, [(self.choice, after_thoughts(text).strip())]
        if self.choice == "required":
            calls = _listed(after_thoughts(text).strip(), self.schemas, "arguments")
            return (None, calls) if calls else (text, [])
        result = None if self.form is None else FORMS[self.form].read(text, self.schemas)
        return (text, []) if result is None else (result[0] or None, result[1])

    def stream(self) -> "Stream":
        return Stream(self)


class Stream:
    """A choice's text while it is drawn: content as soon as it cannot be a call, calls at the end.

    The arguments of a named choice come as they are drawn.
    """

    def __init__(self, tools: Tools):
        self._tools = tools
        self._text = ""
        self._sent = 0  # characters of content, or of a named choice's arguments
        self.calls = 0

    def push(self, text: str, ended: bool) -> Iterator[dict[str, Any]]:
        """Yield the deltas of new text. ended: True for the choice's last text."""
        self._text += text
        tools = self._tools
        if tools.choice in tools.schemas and not _may_think(self._text):
            if not self.calls:
                self.calls = 1
                yield {"tool_calls": [{"index": 0} | call_of((tools.choice, ""))]}
            # as `Tools.read` has them; spaces are sent once more follows
            arguments = self._text.strip()
            if new := arguments[self._sent :]:
                self._sent = len(arguments)
                yield {"tool_calls": [{"index": 0, "function": {"arguments": new}}]}
            return
        if not ended:
            if tools.choice == "auto":
                certain = (
                    len(self._text)
                    if tools.form is None
                    else FORMS[tools.form].certain(self._text, tools.schemas)
                )
                if certain > self._sent:
                    yield {"content": self._text[self._sent : certain]}
                    self._sent = certain
            return
        content, calls = tools.read(self._text)
        rest = (content or "")[self._sent :]
        if rest:
            yield {"content": rest}
        if calls:
            self.calls = len(calls)
            yield {"tool_calls": [{"index": i} | call_of(call) for i, call in enumerate(calls)]}


def call_of(call: Call) -> dict[str, Any]:
    """A call in OpenAI's format."""
    name, arguments = call
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def read_tools(
    fields: Mapping[str, Any], template: str, single: bool = False, parser: str = "auto"
) -> Tools | None:
    """The tools of a chat completion's fields; None without any. Raises Refused.

    template: the model's chat template. single: True if choices should not have several calls.
    parser: one of PARSERS: the format of calls, "auto" for that of the template, "none" for none.
    """
    listed, choice = fields.get("tools"), fields.get("tool_choice")
    if not listed:
        if choice not in (None, "none", "auto"):
            raise _wrong("tool_choice", "none or auto without tools", choice)
        return None
    schemas: dict[str, Any] = {}
    for i, tool in enumerate(listed):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not _NAME.match(name) or tool.get("type") != "function":
            # a template may have tools of its own; none is called without a name
            if choice in (None, "none", "auto"):
                continue
            raise _wrong(f"tools[{i}]", "a function with a name", tool, "tools")
        assert isinstance(function, dict)
        schema = function.get("parameters")
        if schema is not None and not isinstance(schema, dict | bool):
            raise _wrong(f"tools[{i}].function.parameters", "a JSON schema", schema, "tools")
        schemas[name] = {"type": "object"} if schema is None or schema == {} else schema
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else choice.get("name")
        if choice.get("type") != "function" or name not in schemas:
            raise _wrong("tool_choice", f"a function of {', '.join(schemas)}", choice)
        choice = name
    elif choice not in (None, "none", "auto", "required"):
        raise _wrong("tool_choice", "none, auto, required or a function", choice)
    choice = choice or "auto"
    if choice == "none":
        return None
    if choice != "auto":
        for name in GRAMMARS:
            if fields.get(name) is not None:
                raise _wrong(name, "left out with a named or required tool", fields[name])
    if parser == "auto":
        form = next((name for name, form in FORMS.items() if form.sign.search(template)), None)
    else:
        form = None if parser == "none" else parser
    # names that are choices of their own
    if choice in ("auto", "required"):
        schemas = {name: x for name, x in schemas.items() if name not in ("auto", "required")}
    return Tools(schemas, choice, form, single)


@dataclass(frozen=True, slots=True)
class Form:
    """A format of calls.

    sign: found in the templates that have it. read: content and calls of a whole text, None if it
    has no call of these tools. certain: number of the first characters of a text and names of
    tools that are content, whatever follows.
    """

    sign: re.Pattern[str]
    read: Callable[[str, Mapping[str, Any]], tuple[str, list[Call]] | None]
    certain: Certain


def _hermes(text: str, names: Mapping[str, Any]) -> tuple[str, list[Call]] | None:
    before, *parts = text.split("<tool_call>")
    calls: list[Call] = []
    for part in parts:
        inside, end, behind = part.partition("</tool_call>")
        call = _call(_json(inside.strip()), names, "arguments")
        if not end or call is None or behind.strip():
            return None
        calls.append(call)
    return (before.rstrip(), calls) if calls else None


def _mistral(text: str, names: Mapping[str, Any]) -> tuple[str, list[Call]] | None:
    before, mark, rest = text.partition("[TOOL_CALLS]")
    if not mark:
        # a special token, which texts do not have
        before, rest = "", text
    if calls := _listed(rest.strip(), names, "arguments"):
        return before.rstrip(), calls
    calls = []
    for part in rest.split("[TOOL_CALLS]"):
        name, brace, arguments = part.strip().partition("{")
        call = {
            "name": name.strip().removesuffix("[ARGS]"),
            "arguments": _json(brace + arguments),
        }
        own = _call(call, names, "arguments")
        if own is None:
            return None
        calls.append(own)
    return before.rstrip(), calls


def _llama(text: str, names: Mapping[str, Any]) -> tuple[str, list[Call]] | None:
    left = text.strip().removeprefix("<|python_tag|>").strip()
    calls: list[Call] = []
    while left:
        try:
            value, end = json.JSONDecoder().raw_decode(left)
        except (ValueError, RecursionError):
            return None
        call = _call(value, names, "parameters") or _call(value, names, "arguments")
        if call is None:
            return None
        calls.append(call)
        left = left[end:].lstrip(" ;\n")
    return ("", calls) if calls else None


def _before(mark: str) -> Certain:
    """Content ends at the mark, or where the text's end may begin it."""

    def certain(text: str, names: Collection[str]) -> int:
        at = text.find(mark)
        if at < 0:
            at = len(text)
            for size in range(min(len(mark) - 1, at), 0, -1):
                if text.endswith(mark[:size]):
                    at -= size
                    break
        # spaces before a call are no content
        return len(text[:at].rstrip())

    return certain


def _unless_begun(*marks: str) -> Certain:
    """All is content, unless the text begins with one of the marks."""

    def certain(text: str, names: Collection[str]) -> int:
        bare = text.lstrip()
        return 0 if any(bare.startswith(m) or m.startswith(bare) for m in marks) else len(text)

    return certain


def _certain_mistral(text: str, names: Collection[str]) -> int:
    """Without the mark a call is a list, or begins with a tool's name."""
    bare = text.lstrip()
    if bare[:1] in ("", "[") or any(n.startswith(bare) or bare.startswith(n) for n in names):
        return 0
    return _before("[TOOL_CALLS]")(text, names)


FORMS = {
    "mistral": Form(
        re.compile(r"\[TOOL_CALLS\]"),
        _mistral,
        _certain_mistral,
    ),
    "hermes": Form(re.compile(r"<tool_call>"), _hermes, _before("<tool_call>")),
    "llama3_json": Form(
        re.compile(r"<\|python_tag\|>|Environment: ipython|\"parameters\":"),
        _llama,
        _unless_begun("{", "<|python_tag|>"),
    ),
}


PARSERS = ("auto", "none", *FORMS)


def check_parser(name: str, value: str) -> str:
    """Returns the name of a format of calls. Raises ValueError, naming the argument."""
    if value not in PARSERS:
        raise ValueError(f"{name} must be one of {', '.join(PARSERS)}, got {shown(value)}")
    return value


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(value: Any, names: Mapping[str, Any], key: str) -> Call | None:
    """Name and arguments of a call as JSON has it; None for anything else."""
    if not isinstance(value, dict) or not isinstance(value.get(key), dict):
        return None
    if not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    return value["name"], json.dumps(value[key], ensure_ascii=False)


def _listed(text: str, names: Mapping[str, Any], key: str) -> list[Call]:
    """The calls of a list as JSON; empty unless all are calls."""
    value = _json(text)
    calls = [_call(one, names, key) for one in value] if isinstance(value, list) else []
    valid = [call for call in calls if call is not None]
    return valid if len(valid) == len(calls) else []


def _may_think(text: str) -> bool:
    """True while a text may be a thought in front of a grammar's JSON."""
    return not text.lstrip() or text.lstrip()[0] == "<"


def _with_own_names(schema: Any, prefix: str, definitions: dict[str, Any]) -> Any:
    """A schema whose definitions are moved to `definitions`, under names with a prefix."""

    def renamed(value: Any) -> Any:
        if isinstance(value, list):
            return [renamed(one) for one in value]
        if not isinstance(value, dict):
            return value
        copy = {key: renamed(one) for key, one in value.items()}
        pointer = value.get("$ref")
        if isinstance(pointer, str):
            for name in ("$defs", "definitions"):
                if pointer.startswith(f"#/{name}/"):
                    copy["$ref"] = f"#/$defs/{prefix}{pointer.removeprefix(f'#/{name}/')}"
        return copy

    if not isinstance(schema, dict):
        return schema
    for name in ("$defs", "definitions"):
        for key, value in (schema.get(name) or {}).items():
            definitions[f"{prefix}{key}"] = renamed(value)
    left = {key: one for key, one in schema.items() if key not in ("$defs", "definitions")}
    return renamed(left)


def _wrong(name: str, expected: str, value: Any, param: str | None = None) -> Refused:
    return Refused(f"{name} must be {expected}, got {shown(value)}", param=param or name)
