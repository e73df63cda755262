"""Limits of requests, and checks of a body before anything is computed from it.

A client may set only names that the chat template reads. Any other argument of
`apply_chat_template` could change what the tokenizer does: `chat_template` even replaces the
template by a program of the client.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from csd.engine.options.engine_arguments import ServerOptions
from csd.serve.http.errors import Refused
from csd.utils.arguments import default_of
from csd.utils.check import shown


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request, and of all requests together."""

    body: int = default_of(ServerOptions, "max_body")  # bytes
    choices: int = default_of(ServerOptions, "max_n")  # prompts times n
    requests: int = default_of(ServerOptions, "max_requests")  # answered at the same time
    # probabilities of likely tokens in one answer, which takes some 500 bytes for each
    likely: int = 1 << 21
    body_seconds: float = 30.0  # to receive a body
    turns: int = 1024  # messages of a chat
    template: int = 1 << 20  # characters of messages, tools and chat_template_kwargs
    grammar: int = 1 << 16  # characters of a schema, regex or grammar, or of a list of strings
    entries: int = 4096  # values within a schema
    strings: int = 1024  # strings in a list such as stop or bad_words
    ids: int = 1 << 17  # token ids of /detokenize
    # limits of a client: bytes of bodies and of grammars whose requests have not ended
    bodies: int = 1 << 26
    grammars: int = 1 << 19
    read_seconds: float = 30.0  # for a body to wait for a thread, and to be read by it
    readers: int = 4  # threads that read bodies, for all clients
    reader_share: int = 2  # of them for one client
    send_seconds: float = 60.0  # for a reader to take each event


def read_names(tokenizer: Any) -> frozenset[str]:
    """Names that the tokenizer's chat template reads, or one of its named templates."""
    return frozenset(name for text in _templates(tokenizer) for name in _undeclared(text))


def template_text(tokenizer: Any) -> str:
    """The tokenizer's chat template, or all of its named ones; "" without any."""
    return "\n".join(_templates(tokenizer))


def _templates(tokenizer: Any) -> list[str]:
    templates = getattr(tokenizer, "chat_template", None)
    texts = templates.values() if isinstance(templates, Mapping) else [templates]
    return [text for text in texts if isinstance(text, str)]


def check_template_names(options: Mapping[str, Any], tokenizer: Any) -> None:
    """Raises Refused for a name in chat_template_kwargs that a client cannot set."""
    # the tokenizer sets the names of its special tokens
    own = {*_arguments(), *(getattr(tokenizer, "special_tokens_map", None) or ())}
    known = sorted(read_names(tokenizer) - own)
    for name, value in options.items():
        if name not in known:
            raise Refused(
                f"chat_template_kwargs must not have {shown(name)}, got {shown(value)}: the "
                f"model's chat template reads {', '.join(known) or 'no names of clients'}",
                param="chat_template_kwargs",
            )


@lru_cache
def _arguments() -> frozenset[str]:
    from transformers import PreTrainedTokenizerBase

    function = PreTrainedTokenizerBase.apply_chat_template
    # messages: transformers' name of the conversation within a template; the others are functions
    of_template = {"messages", "raise_exception", "strftime_now"}
    tokens = PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES
    return frozenset({*inspect.signature(function).parameters, *of_template, *tokens})


# the model's own templates, of which a server has a few
@lru_cache(maxsize=16)
def _undeclared(text: str) -> frozenset[str]:
    from jinja2 import Environment, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.meta import find_undeclared_variables
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag with which templates mark an assistant's tokens."""

        def __init__(self, environment: Environment):
            super().__init__(environment)
            self.tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(extensions=[Generation, loopcontrols])
    try:
        return frozenset(find_undeclared_variables(environment.parse(text)))
    # the tokenizer cannot render such a template either
    except TemplateError:
        return frozenset()


TEMPLATE = ("messages", "tools", "chat_template_kwargs")
GRAMMARS = ("response_format", "regex", "grammar")
# values of `tool_choice` that make no grammar of the tools
FREE = (None, "none", "auto")
STRINGS = ("stop", "bad_words", "thinking_tags")
IDS = ("logit_bias", "allowed_token_ids", "suppress_tokens", "stop_token_ids")


def check_sizes(body: Mapping[str, Any], limits: Limits, context: int, vocab: int) -> None:
    """Raises Refused, naming the field, for a value that takes long to read."""
    messages = body.get("messages")
    if isinstance(messages, list) and len(messages) > limits.turns:
        raise _over("messages", f"at most {limits.turns} messages", str(len(messages)))
    # a long context needs long messages
    longest = max(limits.template, 8 * context)
    _check_weight(TEMPLATE, body, longest)
    for name in _grammars(body):
        value = body.get(name)
        _check_weight((name,), body, limits.grammar)
        if (entries := _entries(value, limits.entries)) > limits.entries:
            raise _over(name, f"at most {limits.entries} values", f"at least {entries}")
    for name in STRINGS:
        _check_length(name, body.get(name), limits.strings, "strings")
        _check_weight((name,), body, limits.grammar)
    for name in IDS:
        _check_length(name, body.get(name), vocab, "token ids, the size of the vocabulary")


def grammar_size(body: Mapping[str, Any], limits: Limits) -> int:
    """Characters of a checked body's grammars."""
    values = [body.get(name) for name in _grammars(body) if body.get(name)]
    return weight(values, 2 * limits.grammar)


def _grammars(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Fields of a body that a grammar is compiled from."""
    choice = body.get("tool_choice")
    free = choice is None or (isinstance(choice, str) and choice in FREE)
    return GRAMMARS if free else (*GRAMMARS, "tools")


def weight(value: Any, limit: int) -> int:
    """Number of characters and values in a value of JSON; counting ends beyond `limit`."""
    total, left = 0, [value]
    while left and total <= limit:
        one = left.pop()
        total += 1
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, int) and not isinstance(one, bool):
            total += one.bit_length() // 4
        elif isinstance(one, list):
            left.extend(one)
        elif isinstance(one, dict):
            total += sum(map(len, one))
            left.extend(one.values())
    return total


def _entries(value: Any, limit: int) -> int:
    """Number of values within a value of JSON; counting ends beyond `limit`."""
    total, left = 0, [value]
    while left and total <= limit:
        one = left.pop()
        inside = one if isinstance(one, list) else one.values() if isinstance(one, dict) else ()
        total += len(inside)
        left.extend(inside)
    return total


def _check_weight(names: tuple[str, ...], body: Mapping[str, Any], limit: int) -> None:
    weights = {name: weight(body[name], limit) for name in names if body.get(name)}
    if (total := sum(weights.values())) > limit:
        largest = max(weights, key=lambda name: weights[name])
        expected = f"at most {limit} characters and values"
        raise _over(" and ".join(weights), expected, f"at least {total}", largest)


def _check_length(name: str, value: Any, limit: int, of: str) -> None:
    if isinstance(value, list | dict) and len(value) > limit:
        raise _over(name, f"at most {limit} {of}", str(len(value)))


def _over(name: str, expected: str, got: str, param: str | None = None) -> Refused:
    return Refused(f"{name} must have {expected}, got {got}", param=param or name)
