"""The fields of a request: what each is called here, and what is refused.

A field that has no effect on samples and is not implemented is accepted and ignored (`IGNORED`).
Every other field that this page does not list is refused by name, so that nothing that a client
asks for is left out of what it gets.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from csd.engine.options import Options
from csd.engine.service.async_engine import SERVED
from csd.integrations.serve.errors import Refused
from csd.schema.check import shown
from csd.schema.other_names import hint

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
    # served where the engine has options of these names
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "response_format": "response_format",
    "bad_words": "bad_words",
    "allowed_token_ids": "allowed_token_ids",
}
IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "parallel_tool_calls", "priority",
)  # fmt: skip
# fields of the server itself
COMMON = ("model", "stream", "stream_options", "return_token_ids")
CHAT = (
    "messages", "logprobs", "top_logprobs", "tools", "tool_choice", "functions", "function_call",
    "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "modalities",
    "reasoning_effort",
)  # fmt: skip
COMPLETIONS = ("prompt", "logprobs", "echo", "best_of", "suffix", "add_special_tokens")

# a field that is not served -> whether a value of it asks for nothing
NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "presence_penalty": lambda x: x == 0,
    "frequency_penalty": lambda x: x == 0,
    "logit_bias": lambda x: x == {},
    "response_format": lambda x: x == {"type": "text"},
    "bad_words": lambda x: x == [],
    "allowed_token_ids": lambda x: x == [],
    "tool_choice": lambda x: x == "none",
    "functions": lambda x: x == [],
    "function_call": lambda x: x == "none",
    "modalities": lambda x: x == ["text"],
    "reasoning_effort": lambda x: False,
    "best_of": lambda x: x == 1,
    "suffix": lambda x: x == "",
    "add_special_tokens": lambda x: x is True,
}


def check_fields(body: Mapping[str, Any], own: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a body that are given and not ignored. own: those of the endpoint alone.

    Raises Refused, naming the field, for one that is not served.
    """
    known = {*SAMPLING, *COMMON, *own}
    found = {}
    for name, value in body.items():
        if value is None or name in IGNORED:
            continue
        if name not in known:
            raise Refused(
                f"{name} is not served, got {shown(value)}{hint(name, known)}", param=name
            )
        option = SAMPLING.get(name)
        served = name not in NEUTRAL if option is None else is_served(option)
        if served:
            found[name] = value
        elif not NEUTRAL[name](value):
            raise Refused(f"{name} is not served, got {shown(value)}", param=name)
    return found


def is_served(option: str) -> bool:
    """Whether the engine has an option of that name for a request."""
    return option in SERVED and option in Options.__annotations__


def options_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's options that the fields stand for. Raises Refused."""
    found: dict[str, Any] = {}
    for name, option in SAMPLING.items():
        if name not in fields:
            continue
        value = fields[name]
        if option in found and found[option] != value:
            raise Refused(
                f"{name} must be what max_tokens is where both are given, got {shown(value)} and "
                f"{shown(found[option])}", param=name,
            )  # fmt: skip
        # vLLM's name for off
        found[option] = 0 if name == "top_k" and value == -1 else value
    return found


def as_fields(message: str) -> str:
    """An error of the engine with the names of fields in place of its options'."""
    # of several fields of an option the first
    names = {option: name for name, option in reversed(SAMPLING.items()) if option != name}
    return re.sub(r"\b(" + "|".join(names) + r")\b", lambda found: names[found[1]], message)


def named(message: str) -> str | None:
    """The field that an error begins with."""
    first = re.match(r"\w*", message)
    return first[0] if first and first[0] in SAMPLING else None
