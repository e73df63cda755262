"""A choice's text as deltas of a message: content as soon as it cannot be a call, calls at the end.

The arguments of a named choice come as they are drawn. A whole text is a stream of one piece.
"""

import json
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from csd.engine.options.open_thought import Front
from csd.serve.http.api.calls.answer_text import Certain, Shape, content_and_calls
from csd.serve.http.api.calls.json_text import Call, call_of_object, members_at

Delta = dict[str, Any]


class AnswerStream:
    """A choice in whose text calls have a format. opened: True if its prompt leaves a thought open.

    calls: number of its calls so far.
    """

    def __init__(self, shape: Shape, opened: bool):
        self.calls = 0
        self._shape, self._opened = shape, opened
        self._certain = Certain(shape, opened)
        self._text = ""

    def push(self, text: str, ended: bool) -> Iterator[Delta]:
        """Yield the deltas of new text. ended: True for the choice's last text."""
        self._text += text
        sent = self._certain.length
        if not ended:
            certain = self._certain.push(self._text)
            yield from _content(self._text[sent:certain])
            return
        content, calls = content_and_calls(self._shape, self._text, self._opened)
        self.calls = len(calls)
        yield from _content(content[sent:])
        yield from _calls(calls)


class NamedStream(AnswerStream):
    """A text that a grammar makes the arguments of one tool, behind a thought or without one."""

    def __init__(self, name: str, shape: Shape, opened: bool):
        super().__init__(shape, opened)
        self._name = name
        self._sent = 0  # characters of the arguments

    def push(self, text: str, ended: bool) -> Iterator[Delta]:
        self._text += text
        sent = self._certain.length
        certain, start = self._certain.push(self._text), self._certain.start
        if start is None and ended:
            start = Front(self._shape.tags, self._opened).push(self._text, len(self._text))
            # a thought without an answer is no call
            certain = len(self._text) if start is None else len(self._text[:start].rstrip())
        yield from _content(self._text[sent:certain])
        if start is None:
            return
        if not self.calls:
            self.calls = 1
            yield from _calls([(self._name, "")])
        # outer spaces are no part of the arguments; spaces are sent once more follows
        arguments = self._text[start:].strip()
        if new := arguments[self._sent :]:
            self._sent = len(arguments)
            yield {"tool_calls": [{"index": 0, "function": {"arguments": new}}]}


# fields of a message that have its thoughts, in the response templates of tokenizers
THOUGHTS = ("reasoning_content", "reasoning", "thinking")


class TemplateStream:
    """A text that transformers parses by the tokenizer's response template.

    Text that it cannot parse, calls of unknown tools, and thoughts behind words are content.
    parser: makes the parser of a choice. names: of the tools.
    """

    def __init__(self, parser: Callable[[], Any], names: Collection[str]):
        self.calls = 0
        self._new, self._names = parser, names
        self._parser: Any = parser()  # None once a part could not be parsed
        self._fields = _Fields(names)
        self._text = ""
        self._sent = self._thought = 0  # characters of content and of thoughts

    def push(self, text: str, ended: bool) -> Iterator[Delta]:
        self._text += text
        if self._parser is None:
            self._fields.content += text
        else:
            try:
                self._fields.add(self._parser.feed(text))
                if ended:
                    self._fields.add(self._parser.finalize()[1])
            # any part of a template may raise for a text that does not fit it
            except Exception:
                self._parser, self._fields = None, self._again()
        fields = self._fields
        if thought := fields.thought[self._thought :]:
            self._thought = len(fields.thought)
            yield {"reasoning_content": thought}
        content = fields.content if ended and not fields.calls else fields.content.rstrip()
        if not self._sent:
            # spaces around a thought or a call are no content
            self._sent = len(content) - len(content.lstrip())
        yield from _content(content[self._sent :])
        self._sent = max(self._sent, len(content))
        if ended:
            self.calls = len(fields.calls)
            yield from _calls(fields.calls)

    def _again(self) -> "_Fields":
        """The fields of a text with a part that cannot be parsed.

        Letter by letter, so that they do not depend on the pieces in which the text came: an error
        leaves out the events of its whole piece.
        """
        parser, fields = self._new(), _Fields(self._names)
        for i, letter in enumerate(self._text):
            try:
                fields.add(parser.feed(letter))
            except Exception:
                fields.content += fields.body + self._text[i + 1 :]
                return fields
        fields.content += fields.body
        return fields


Stream = AnswerStream | TemplateStream


class _Fields:
    """Content, thoughts and calls from the events of transformers' parser."""

    def __init__(self, names: Collection[str]):
        self._names = names
        self.content = self.thought = ""
        self.body = ""  # of the calls that are being drawn
        self.calls: list[Call] = []

    def add(self, events: Iterable[Mapping[str, Any]]) -> None:
        for event in events:
            kind, field = event["type"], event["field"]
            if kind == "region_open":
                self.body = ""
            elif kind == "region_chunk":
                if field == "tool_calls":
                    self.body += event["text"]
                elif field in THOUGHTS and not self.content.strip():
                    self.thought += event["text"]
                else:
                    self.content += event["text"]
            elif field == "tool_calls":
                values = event["value"] if isinstance(event["value"], list) else [event["value"]]
                calls = [call for value in values if (call := self._call(value)) is not None]
                self.calls += calls
                if not calls:
                    self.content += self.body
                self.body = ""

    def _call(self, value: Any) -> Call | None:
        function = value.get("function") if isinstance(value, dict) else None
        if not isinstance(function, dict):
            return None
        arguments = function.get("arguments")
        try:
            source = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError):
            return None
        # a template's JSON has them as the model spelled them
        with suppress(ValueError):
            written, _ = members_at(self.body.strip(), 0)
            source = next((text for one, text in written.values() if one == arguments), source)
        members = {"name": (function.get("name"), ""), "arguments": (arguments, source)}
        return call_of_object(members, self._names, marked=True)


def merged(deltas: Iterable[Delta]) -> tuple[Delta, list[Call]]:
    """The fields of a message without its calls, and its calls; without a text content is None."""
    texts: dict[str, str] = {}
    calls: list[list[str]] = []
    for delta in deltas:
        for name in delta.keys() - {"tool_calls"}:
            texts[name] = texts.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    return {"content": None if calls else ""} | texts, [(name, text) for name, text in calls]


def call_of(call: Call) -> dict[str, Any]:
    """A call in OpenAI's format."""
    name, arguments = call
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _content(text: str) -> Iterator[Delta]:
    if text:
        yield {"content": text}


def _calls(calls: Iterable[Call]) -> Iterator[Delta]:
    listed = [{"index": i} | call_of(call) for i, call in enumerate(calls)]
    if listed:
        yield {"tool_calls": listed}
