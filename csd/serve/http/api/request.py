"""Parsing and checks of a request's body: prompts, sampling options, contents of the answer."""

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from csd.engine.results.logprobs import MOST_TOP
from csd.serve import AsyncEngine, Reader
from csd.serve.http.api import fields
from csd.serve.http.api.fields import asks_for_nothing
from csd.serve.http.api.tools import Tools, read_tools
from csd.serve.http.checks import check_template_names, read_names, template_text
from csd.serve.http.errors import Refused, wrong
from csd.utils.check import fits, shown

# default max_tokens of a completion, as in OpenAI's interface
COMPLETION_TOKENS = 16
# and of a chat, unless the context is shorter
CHAT_TOKENS = 512


@dataclass(slots=True)
class Asked:
    """One parsed request."""

    chat: bool
    prompts: list[Any]
    options: dict[str, Any]  # of `AsyncEngine.submit`
    stream: bool = False
    include_usage: bool = False
    top: int | None = None  # likeliest tokens per token; None: no log-probabilities
    token_ids: bool = False
    echo: bool = False
    repeats: int = 1  # times that the answer has its log-probabilities
    tools: Tools | None = None  # that the choices of a chat may call
    nothing_new: bool = False  # max_tokens is 0: one token is drawn and not shown
    seedless: bool = False  # True: the server has drawn its seed
    handles: list[Reader] = field(default_factory=list)  # one per prompt
    ends: list[Callable[[], Any]] = field(default_factory=list)  # called once it has ended

    @property
    def samples(self) -> int:
        """Choices per prompt."""
        return self.options.get("num_samples", 1)

    def submit(
        self,
        engine: AsyncEngine,
        owner: str | None,
        client: str | None = None,
        group: str | None = None,
    ) -> None:
        """Submit all prompts to the engine; if it refuses one, all are cancelled.

        group: owner while it is in flight, if it has none.
        """
        # nothing of a request without an owner stays after its end
        keeps = owner is not None
        # without an owner a random one, so that equal prompts of one request are one group
        owner = owner or group or secrets.token_hex(8)
        first = self.options.pop("first_sample", 0)
        taken: dict[str, int] = {}  # next free sample index of each prompt
        try:
            for prompt in self.prompts:
                key = repr(prompt)
                start = taken.get(key, first)
                handle = engine.submit(
                    prompt,
                    owner=owner,
                    client=client,
                    prefix_cache=keeps,
                    stream=self.stream,
                    first_sample=start,
                    top_logprobs=self.top or 0,
                    score_prompt=self.top if self.echo else None,
                    on_error="return",
                    **self.options,
                )
                # a repeated prompt continues the sample indices
                taken[key] = start + self.samples
                self.handles.append(handle)
        except BaseException:
            self.cancel()
            raise

    def raise_error(self) -> None:
        """Raise the first error if no choice could be drawn to its end."""
        samples = [s for h in self.handles for s in h.request.progress.finished.values()]
        if samples and all(s.error is not None for s in samples) and not self.nothing_new:
            errors = self.handles[0].request.progress.errors
            raise errors[min(errors)]

    def cancel(self) -> None:
        """End the request; prompts that have ended are not affected."""
        for handle in self.handles:
            handle.cancel()
        while self.ends:
            self.ends.pop()()


def read_chat(body: Mapping[str, Any], tokenizer: Any, parser: str = "auto") -> Asked:
    """Parse the body of a chat completion. Raises Refused, naming the field.

    parser: of calls in texts, as in `read_tools`.
    """
    values = fields.check_fields(body, fields.CHAT, fields.NOTHING_IN_CHAT)
    messages = with_tools(read_messages(values.get("messages")), template_text(tokenizer))
    options = fields.options_of(values)
    single = not _an("parallel_tool_calls", values.get("parallel_tool_calls", True), bool)
    tools = read_tools(values, template_text(tokenizer), single, parser, tokenizer)
    if tools is not None:
        if tools.schema is not None:
            options["json_schema"] = tools.schema
        elif tools.needs_special_tokens(tokenizer):
            options.setdefault("skip_special_tokens", False)
    template = {**_an("chat_template_kwargs", values.get("chat_template_kwargs", {}), dict)}
    check_template_names(template, tokenizer)
    for name in ("add_generation_prompt", "continue_final_message"):
        if name in values:
            template[name] = _an(name, values[name], bool)
    read = read_names(tokenizer) if fields.TEMPLATE.keys() & values.keys() else ()
    for name, kind in fields.TEMPLATE.items():
        if name not in values:
            continue
        value = _an(name, values[name], kind)
        if name in read:
            template[name] = value
        elif not asks_for_nothing(name, value, fields.NOTHING_IF_UNREAD):
            raise Refused(
                f"the model's chat template does not read {name}, so the model would not see it; "
                f"take a model whose template does (docs/serve.md), got {shown(value)}",
                param=name,
            )
    if template:
        options["chat_template_kwargs"] = template
    asked = Asked(True, [messages], options, tools=tools)
    if _an("logprobs", values.get("logprobs", False), bool):
        asked.top = _top("top_logprobs", values.get("top_logprobs", 0))
    elif values.get("top_logprobs"):
        raise Refused("top_logprobs needs logprobs: true", param="top_logprobs")
    return _with_common(asked, values)


def read_completion(body: Mapping[str, Any], tokenizer: Any) -> Asked:
    """Parse the body of a completion. Raises Refused, naming the field."""
    values = fields.check_fields(body, fields.COMPLETIONS, fields.NOTHING_IN_COMPLETIONS)
    options = {"max_new_tokens": COMPLETION_TOKENS} | fields.options_of(values)
    asked = Asked(False, _prompts(values.get("prompt")), options)
    asked.echo = _an("echo", values.get("echo", False), bool)
    if "logprobs" in values:
        asked.top = _top("logprobs", values["logprobs"])
    if options["max_new_tokens"] == 0 and not isinstance(options["max_new_tokens"], bool):
        if not asked.echo:
            raise Refused("max_tokens of 0 needs echo: true", param="max_tokens")
        asked.nothing_new = True
        options["max_new_tokens"] = 1
    if asked.echo and asked.top is None and tokenizer is None:
        raise Refused("echo needs a tokenizer, and the model has none", param="echo")
    return _with_common(asked, values)


def _with_common(asked: Asked, values: Mapping[str, Any]) -> Asked:
    asked.stream = _an("stream", values.get("stream", False), bool)
    asked.token_ids = _an("return_token_ids", values.get("return_token_ids", False), bool)
    given, nothing = values.get("stream_options", {}), fields.NOTHING_IN_STREAM_OPTIONS
    more = {
        name: value
        for name, value in _an("stream_options", given, dict).items()
        if not asks_for_nothing(name, value, nothing)
    }
    if more and not asked.stream:
        raise Refused("stream_options needs stream: true", param="stream_options")
    for name in more:
        if name != "include_usage":
            raise Refused(f"stream_options.{name} is not supported", param=f"stream_options.{name}")
    usage = more.get("include_usage", False)
    asked.include_usage = _an("stream_options.include_usage", usage, bool)
    if "seed" not in asked.options:
        asked.options["seed"], asked.seedless = secrets.randbits(63), True
    return asked


def read_messages(value: Any) -> list[Any]:
    """Returns a list of messages, not yet checked. Raises Refused for any other value."""
    if not isinstance(value, list) or not value:
        raise wrong("messages", "a list of messages", value)
    for i, message in enumerate(value):
        # a list of numbers or texts would be token ids, or prompts of their own
        if not isinstance(message, dict):
            raise wrong(f"messages[{i}]", "an object", message, "messages")
    return value


def with_tools(messages: list[Any], template: str) -> list[Any]:
    """Messages in which calls and results of functions, of OpenAI's first interface, are of tools.

    They stay as they are for a template that does not name tools.
    """
    if not re.search("""['"]tool['"]""", template):
        return messages
    changed, called = [], ""
    for i, message in enumerate(messages):
        role, call = message.get("role"), message.get("function_call")
        if role == "assistant" and isinstance(call, dict) and not message.get("tool_calls"):
            called = f"call_{i}"
            message = {key: value for key, value in message.items() if key != "function_call"}
            message["tool_calls"] = [{"id": called, "type": "function", "function": call}]
        elif role == "function":
            message = message | {"role": "tool"} | ({"tool_call_id": called} if called else {})
        changed.append(message)
    return changed


def _prompts(value: Any) -> list[Any]:
    """Returns a list of prompts from a text, token ids, or a list of these."""
    if isinstance(value, str) or (fits(value, list[int]) and value):
        return [value]
    if (
        isinstance(value, list)
        and value
        and all(isinstance(one, str) or fits(one, list[int]) for one in value)
    ):
        return value
    raise wrong("prompt", "a string, token ids, or a list of these", value)


def _top(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST_TOP:
        raise wrong(name, f"a whole number from 0 to {MOST_TOP}", value)
    return value


_NAMES = {bool: "true or false", dict: "an object", list: "a list", str: "a string"}


def _an(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise wrong(name, _NAMES[kind], value)
    return value
