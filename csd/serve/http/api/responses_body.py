"""Body of a request to /v1/responses, as the body of the chat completion with the same text."""

import re
from collections.abc import Mapping
from typing import Any

from csd.serve.http.api.fields import (
    CHAT,
    INSTEAD_IN_RESPONSES,
    NO_RESPONSES,
    NOTHING_IN_RESPONSES,
    RESPONSES,
    asks_for_nothing,
    check_fields,
)
from csd.serve.http.api.request import Asked, read_chat
from csd.serve.http.errors import Refused, wrong
from csd.serve.http.names import PLURALS
from csd.utils.check import shown

LOGPROBS = "message.output_text.logprobs"
# other values of `include`, of parts that no response of this server has
NOT_INCLUDED = (
    *("reasoning.encrypted_content", "message.input_image.image_url", "file_search_call.results"),
    *("web_search_call.results", "web_search_call.action.sources"),
    *("code_interpreter_call.outputs", "computer_call_output.output.image_url"),
)
# values of `reasoning.summary`: no thought is summarized
SUMMARIES = ("auto", "concise", "detailed")

# fields of a chat completion -> their names in a response's body
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
# fields of a response alone
_OWN = {*RESPONSES} - {*CHAT} | {"tools"}


class ChatBody:
    """The chat completion that draws a response's text.

    body: of the response, unchanged. chat: of the chat completion. parser: as in `read_chat`.

    Raises Refused, naming the field, for a value that a chat completion cannot have.
    """

    def __init__(self, body: Mapping[str, Any], parser: str = "auto"):
        fields = check_fields(
            body, RESPONSES, NOTHING_IN_RESPONSES, NO_RESPONSES, INSTEAD_IN_RESPONSES
        )
        self.body, self._parser = body, parser
        self._items: list[str] = []  # name of each message's item in the body
        chat = {name: value for name, value in fields.items() if name not in _OWN}
        chat["messages"] = self._messages(fields)
        if "max_output_tokens" in fields:
            chat["max_tokens"] = fields["max_output_tokens"]
        if "tools" in fields:
            chat["tools"] = _tools(fields["tools"])
        text = _parts("text", fields.get("text"), {"format", "verbosity"})
        if not asks_for_nothing("verbosity", text.get("verbosity"), NOTHING_IN_RESPONSES):
            raise wrong("text.verbosity", "medium or left out", text["verbosity"])
        if text.get("format") is not None:
            chat["response_format"] = _format(text["format"])
        summaries = {"summary", "generate_summary"}
        reasoning = _parts("reasoning", fields.get("reasoning"), {"effort"} | summaries)
        for name in summaries:
            if (summary := reasoning.get(name)) is not None and summary not in SUMMARIES:
                expected = f"{', '.join(SUMMARIES)} or left out"
                raise wrong(f"reasoning.{name}", expected, summary)
        if reasoning.get("effort") is not None:
            chat["reasoning_effort"] = reasoning["effort"]
        include, known = fields.get("include", []), (LOGPROBS, *NOT_INCLUDED)
        if not isinstance(include, list) or any(one not in known for one in include):
            raise wrong("include", f"a list of {', '.join(known)}", include)
        if LOGPROBS in include:
            chat["logprobs"] = True
        elif fields.get("top_logprobs"):
            raise Refused(f"top_logprobs needs include: ['{LOGPROBS}']", param="top_logprobs")
        self.chat: dict[str, Any] = chat

    def read(self, chat: Mapping[str, Any], tokenizer: Any) -> Asked:
        """Parse the body of the chat completion. Raises Refused, in its names."""
        asked = read_chat(chat, tokenizer, self._parser)
        if asked.stream:
            # in deltas, at the end of the text, of its part and of its item, and in the response
            asked.repeats = 5
        return asked

    def refusal(self, refused: Refused) -> Refused:
        """An error about the chat completion, in the names of the response's body."""
        message = refused.message.replace("].function.", "].")
        # an index of a message, wherever the error has it
        message = re.sub(r"\bmessages\[(\d+)\]", self._item, message)
        for singular, plural in PLURALS.items():
            message = re.sub(rf"^messages {plural}\b", f"input {singular}", message)
        for name, own in _NAMES.items():
            message = re.sub(rf"^{name}\b", own, message)
        # within an error about the prompt, or about the template
        message = re.sub(r"\bmax_tokens(?==)", _NAMES["max_tokens"], message)
        message = message.replace("reasoning_effort", _NAMES["reasoning_effort"])
        param = _NAMES.get(refused.param or "", refused.param)
        return Refused(message, status=refused.status, param=param, code=refused.code)

    def _item(self, match: re.Match[str]) -> str:
        number = int(match[1])
        return self._items[number] if number < len(self._items) else "input"

    def _messages(self, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        instructions = fields.get("instructions")
        if instructions is not None:
            if not isinstance(instructions, str):
                raise wrong("instructions", "a string", instructions)
            messages.append({"role": "system", "content": instructions})
            self._items.append("instructions")
        items = fields.get("input")
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        if not isinstance(items, list) or not items:
            raise wrong("input", "a string or a list of items", items)
        thought = ""
        for i, item in enumerate(items):
            if isinstance(item, dict) and item.get("type") == "reasoning":
                thought += _thought(f"input[{i}]", item)
                continue
            message = _message(f"input[{i}]", item)
            last = messages[-1] if messages else {}
            # a response has its thought, its text and its calls as items of their own
            joined = "tool_calls" in message and last.get("role") == "assistant"
            if thought and message["role"] == "assistant":
                own = last if joined else message
                own["reasoning_content"] = own.get("reasoning_content", "") + thought
            thought = ""
            if joined:
                last.setdefault("tool_calls", []).extend(message["tool_calls"])
                continue
            messages.append(message)
            self._items.append(f"input[{i}]")
        return messages


def _thought(name: str, item: dict[str, Any]) -> str:
    """Text of a thought, or of its summary where another server keeps the thought; "" without.

    Raises Refused.
    """
    texts = {}
    for field, joint in (("content", ""), ("summary", "\n\n")):
        parts = item.get(field) or []
        if not isinstance(parts, list):
            raise wrong(f"{name}.{field}", "a list of texts", parts, "input")
        for i, part in enumerate(parts):
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise wrong(f"{name}.{field}[{i}]", "an object with a text", part, "input")
        texts[field] = joint.join(part["text"] for part in parts)
    return texts["content"] or texts["summary"]


def _message(name: str, item: Any) -> dict[str, Any]:
    """The message of an item of `input`. Raises Refused."""
    if not isinstance(item, dict):
        raise wrong(name, "an object", item, "input")
    kind = item.get("type", "message")
    if kind == "message":
        return {"role": item.get("role"), "content": item.get("content")}
    if kind == "function_call":
        for key in ("call_id", "name", "arguments"):
            if not isinstance(item.get(key), str):
                raise wrong(f"{name}.{key}", "a string", item.get(key), "input")
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        output = item.get("output")
        if not isinstance(output, str | list):
            raise wrong(f"{name}.output", "a string or a list of texts", output, "input")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    kinds = "message, reasoning, function_call or function_call_output"
    raise wrong(f"{name}.type", kinds, kind, "input")


def _tools(tools: Any) -> list[dict[str, Any]]:
    """Functions as a chat completion has them. Raises Refused for tools of another kind."""
    if not isinstance(tools, list):
        raise wrong("tools", "a list", tools)
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise wrong(f"tools[{i}]", "a function: the server has no tools itself", tool, "tools")
        if not isinstance(tool.get("name"), str):
            raise wrong(f"tools[{i}].name", "a string", tool.get("name"), "tools")
    keys = ("name", "description", "parameters", "strict")
    return [
        {"type": "function", "function": {key: tool[key] for key in keys if key in tool}}
        for tool in tools
    ]


def _format(value: Any) -> Any:
    """The `response_format` of a text's format."""
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        return value
    if value.get("schema") is None:
        raise wrong("text.format", "a type and, for json_schema, a schema", value)
    return {"type": "json_schema", "json_schema": {k: v for k, v in value.items() if k != "type"}}


def _parts(name: str, value: Any, known: set[str]) -> dict[str, Any]:
    """The fields of an object, of which only some are supported. Raises Refused."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    for key, one in value.items():
        if key not in known and one is not None:
            raise Refused(f"{name}.{key} is not supported, got {shown(one)}", param=f"{name}.{key}")
    return value
