"""Sizes of a request's values, checked before anything is computed from them."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from csd.integrations.serve.clients import Limits
from csd.integrations.serve.errors import Refused

TEMPLATE = ("messages", "tools", "chat_template_kwargs")
GRAMMARS = ("response_format", "regex", "grammar")
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
    for name in GRAMMARS:
        value = body.get(name)
        _check_weight((name,), body, limits.grammar)
        if isinstance(value, dict) and (entries := _entries(value, limits.entries)) is not None:
            raise _over(name, f"at most {limits.entries} values", f"at least {entries}")
    for name in STRINGS:
        _check_length(name, body.get(name), limits.strings, "strings")
        _check_weight((name,), body, limits.grammar)
    for name in IDS:
        _check_length(name, body.get(name), vocab, "token ids, the size of the vocabulary")


def grammar_size(body: Mapping[str, Any], limits: Limits) -> int:
    """Characters of a checked body's grammars."""
    return weight([body.get(name) for name in GRAMMARS if body.get(name)], 2 * limits.grammar)


def weight(value: Any, most: int) -> int:
    """Number of characters and values in a value of JSON; counting ends beyond `most`."""
    total, left = 0, [value]
    while left and total <= most:
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


def _entries(value: Any, most: int) -> int | None:
    """The number of values in a value, if it is above `most`."""
    total, left = 0, [value]
    while left and total <= most:
        one = left.pop()
        inside = one if isinstance(one, list) else one.values() if isinstance(one, dict) else ()
        total += len(inside)
        left.extend(chain(inside))
    return total if total > most else None


def _check_weight(names: tuple[str, ...], body: Mapping[str, Any], most: int) -> None:
    weights = {name: weight(body[name], most) for name in names if body.get(name)}
    if (total := sum(weights.values())) > most:
        largest = max(weights, key=lambda name: weights[name])
        raise _over(
            " and ".join(weights),
            f"at most {most} characters and values",
            f"at least {total}",
            largest,
        )


def _check_length(name: str, value: Any, most: int, of: str) -> None:
    if isinstance(value, list | dict) and len(value) > most:
        raise _over(name, f"at most {most} {of}", str(len(value)))


def _over(name: str, expected: str, got: str, param: str | None = None) -> Refused:
    return Refused(f"{name} must have {expected}, got {got}", param=param or name)
