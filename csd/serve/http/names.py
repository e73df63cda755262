"""Names of the engine's options in requests, and in errors about them."""

import re
from collections.abc import Mapping
from typing import Any

# fields of both endpoints -> options of the engine
SAMPLING = {
    "n": "num_samples",
    "seed": "seed",
    "first_sample": "first_sample",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "include_stop_str_in_output": "include_stop",
    "skip_special_tokens": "skip_special_tokens",
    "truncate_prompt_tokens": "truncate_prompt",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "response_format": "json_schema",
    "bad_words": "bad_words",
    "allowed_token_ids": "allowed_token_ids",
    "suppress_tokens": "suppress_tokens",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "regex": "regex",
    "grammar": "grammar",
    "max_thinking_tokens": "max_thinking_tokens",
    "thinking_tags": "thinking_tags",
}
# fields beside those of options that errors begin with
OTHERS = ("prompt", "messages", "chat_template_kwargs", "tools")
_PLURALS = {"must": "must", "cannot": "cannot", "does": "do", "is not": "are not"}


def as_fields(message: str, body: Mapping[str, Any] | None = None) -> str:
    """An error of the engine with the names of fields in place of its options'.

    body: of the request; where an option has two names, the error has the one that is in it.
    """
    # else of several fields of an option the first
    names = {option: name for name, option in reversed(SAMPLING.items())}
    for name, option in SAMPLING.items():
        if body is not None and body.get(name) is not None:
            names[option] = name
    names = {option: name for option, name in names.items() if option != name}
    return re.sub(r"\b(" + "|".join(names) + r")\b", lambda found: names[found[1]], message)


def as_messages(message: str) -> str:
    """An error about a prompt, in the terms of a chat completion's body."""
    for verb, plural in _PLURALS.items():
        message = re.sub(rf"^prompt {verb}\b", f"messages {plural}", message)
    # the first place within the messages
    return re.sub(r"\b(as|have) '(?=\[\d)", r"\1 'messages", message, count=1)


def named(message: str) -> str | None:
    """The field that an error begins with."""
    first = re.match(r"\w*", message)
    return first[0] if first and first[0] in (*SAMPLING, *OTHERS) else None
