"""Tools of a request, and how a choice calls them.

With `tool_choice` "auto" the model writes calls in the format of its chat template, and text that
is no such call stays text. A named choice makes the text the arguments of that tool, by its JSON
schema as grammar, and "required" a list of calls.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from csd.engine.options.open_thought import Pairs, leaves_thought_open
from csd.engine.options.thinking import PAIRS, special_ids
from csd.serve.http.api.calls.answer_text import Shape
from csd.serve.http.api.calls.forms import FORMS, LISTED, NONE, form_of
from csd.serve.http.api.calls.streams import AnswerStream, NamedStream, Stream, TemplateStream
from csd.serve.http.checks import FREE, GRAMMARS
from csd.serve.http.errors import wrong

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")


@dataclass(frozen=True)
class Tools:
    """Tools that a request's choices may call.

    schemas: of their arguments, by name. choice: "auto", "required", or the name of a tool. form:
    format of the template's calls, a key of FORMS; None: only a grammar makes calls. single: True
    limits "required" to one call. tags: of thoughts; empty if a grammar leaves no room for them.
    parser: from a prompt's text to transformers' parser of the texts behind it, in place of a form.
    """

    schemas: dict[str, Any]
    choice: str
    form: str | None
    single: bool = False
    tags: Pairs = PAIRS
    parser: Callable[[str], Any] | None = None

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

    @cached_property
    def _shape(self) -> Shape:
        form = NONE if self.form is None else FORMS[self.form]
        return Shape(form if self.choice == "auto" else LISTED, self.schemas, self.tags)

    def needs_special_tokens(self, tokenizer: Any) -> bool:
        """True if a mark of the calls is a special token, which texts leave out."""
        if self.parser is not None:
            return True
        added: Mapping[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
        special = special_ids(tokenizer)
        return any(added.get(mark) in special for mark in self._shape.form.marks)

    def stream(self, prompt: str = "", header: str = "") -> Stream:
        """The stream of a choice.

        prompt: the text of its prompt. header: `answer_header` of the tokenizer.
        """
        if self.choice == "auto" and self.parser is not None:
            return TemplateStream(partial(self.parser, prompt), self.schemas)
        opened = leaves_thought_open(prompt, header, self.tags)
        if self.choice in self.schemas:
            return NamedStream(self.choice, self._shape, opened)
        return AnswerStream(self._shape, opened)


def read_tools(
    fields: Mapping[str, Any],
    template: str,
    single: bool = False,
    parser: str = "auto",
    tokenizer: Any = None,
) -> Tools | None:
    """The tools of a chat completion's fields; None without any. Raises Refused.

    template: the model's chat template. single: True if choices should not have several calls.
    parser: one of PARSERS: the format of calls, "auto" for that of the template, "none" for none.
    tokenizer: with "auto", transformers parses texts if it has a response template.
    """
    listed, choice = fields.get("tools"), fields.get("tool_choice")
    if not listed:
        if choice not in FREE:
            raise wrong("tool_choice", "none or auto without tools", choice)
        return None
    schemas: dict[str, Any] = {}
    for i, tool in enumerate(listed):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not _NAME.match(name) or tool.get("type") != "function":
            # a template may have tools of its own; none is called without a name
            if choice in FREE:
                continue
            raise wrong(f"tools[{i}]", "a function with a name", tool, "tools")
        assert isinstance(function, dict)
        schema = function.get("parameters")
        if schema is not None and not isinstance(schema, dict | bool):
            raise wrong(f"tools[{i}].function.parameters", "a JSON schema", schema, "tools")
        schemas[name] = {"type": "object"} if schema is None or schema == {} else schema
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        # the prompt shows all tools; only these are called
        choice, schemas = _allowed(choice, schemas)
    elif isinstance(choice, dict):
        choice = _function_of(choice, schemas, "tool_choice")
    elif choice not in (*FREE, "required"):
        raise wrong("tool_choice", "none, auto, required, allowed_tools or a function", choice)
    choice = choice or "auto"
    if choice == "none":
        return None
    for name in GRAMMARS if choice != "auto" else ():
        if fields.get(name) is not None:
            raise wrong(name, "left out with a named or required tool", fields[name])
    form, parse = None if parser == "none" else parser, None
    if parser == "auto":
        form = form_of(template)
        if getattr(tokenizer, "response_template", None) is not None:
            parse = partial(_parser, tokenizer, listed)
    # names that are choices of their own
    if choice in ("auto", "required"):
        schemas = {name: x for name, x in schemas.items() if name not in ("auto", "required")}
    return Tools(schemas, choice, form, single, _tags(fields, choice), parse)


def _function_of(tool: Any, schemas: Mapping[str, Any], name: str) -> str:
    """Name of the function that a choice names, as chats or as responses do. Raises Refused."""
    tool = tool if isinstance(tool, dict) else {"type": tool}
    function = tool.get("function")
    named = function.get("name") if isinstance(function, dict) else tool.get("name")
    if tool.get("type") != "function" or named not in schemas:
        raise wrong(name, f"a function of {', '.join(schemas)}", tool, "tool_choice")
    return str(named)


def _allowed(choice: dict[str, Any], schemas: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Mode and schemas of the tools that `allowed_tools` lists. Raises Refused."""
    inner = choice.get("allowed_tools")
    name = "tool_choice.allowed_tools" if isinstance(inner, dict) else "tool_choice"
    asked = inner if isinstance(inner, dict) else choice
    mode, listed = asked.get("mode"), asked.get("tools")
    if mode not in ("auto", "required"):
        raise wrong(f"{name}.mode", "auto or required", mode, "tool_choice")
    if not isinstance(listed, list) or not listed:
        raise wrong(f"{name}.tools", "a list of functions", listed, "tool_choice")
    names = [_function_of(tool, schemas, f"{name}.tools[{i}]") for i, tool in enumerate(listed)]
    return mode, {own: schema for own, schema in schemas.items() if own in names}


def _tags(fields: Mapping[str, Any], choice: str) -> Pairs:
    """Pairs of tags of the thoughts that a text may have."""
    # a grammar without a thinking budget begins with the text
    if choice != "auto" and fields.get("max_thinking_tokens") is None:
        return ()
    own = fields.get("thinking_tags")
    # as token ids they are no text; values of other types are refused with the engine's options
    texts = (
        [tag for tag in own[:2] if isinstance(tag, str) and tag] if isinstance(own, list) else []
    )
    return ((texts[0], texts[1]),) if len(texts) == 2 else PAIRS


def _parser(tokenizer: Any, listed: list[Any], prompt: str) -> Any:
    return tokenizer.get_response_parser(prefix=prompt, tools=listed)


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
    return renamed({k: one for k, one in schema.items() if k not in ("$defs", "definitions")})
