"""Names of the engine's options in requests, and in errors about them."""

import re

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


def as_fields(message: str) -> str:
    """An error of the engine with the names of fields in place of its options'."""
    # of several fields of an option the first
    names = {option: name for name, option in reversed(SAMPLING.items()) if option != name}
    return re.sub(r"\b(" + "|".join(names) + r")\b", lambda found: names[found[1]], message)


def named(message: str) -> str | None:
    """The field that an error begins with."""
    first = re.match(r"\w*", message)
    return first[0] if first and first[0] in SAMPLING else None
