"""Fields of a request: the engine's option for each, and the fields that are refused.

A field that has no effect on samples and is not implemented is accepted and ignored (`IGNORED`).
Every other field that this module does not list is refused by name, so that no option of a client
is silently dropped.
"""

from collections.abc import Callable, Mapping
from typing import Any

from csd.integrations.serve.errors import Refused
from csd.integrations.serve.field_names import SAMPLING
from csd.schema.check import shown
from csd.schema.other_names import hint

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

# unsupported field -> test whether a value has no effect and is therefore accepted
NEUTRAL: dict[str, Callable[[Any], bool]] = {
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
    """Returns the fields of a body that have an effect. own: fields of this endpoint only.

    Raises Refused, naming the field, for an unsupported one.
    """
    known = {*SAMPLING, *COMMON, *own}
    found = {}
    for name, value in body.items():
        if value is None or name in IGNORED:
            continue
        if name not in known:
            raise Refused(
                f"{name} is not supported, got {shown(value)}{hint(name, known)}", param=name
            )
        if name not in NEUTRAL:
            found[name] = value
        elif not NEUTRAL[name](value):
            raise Refused(f"{name} is not supported, got {shown(value)}", param=name)
    return found


def options_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert fields to options of the engine. Raises Refused."""
    found: dict[str, Any] = {}
    for name, option in SAMPLING.items():
        if name not in fields:
            continue
        value = fields[name]
        if option in found and found[option] != value:
            raise Refused(
                f"{name} must equal max_tokens if both are given, got {shown(value)} and "
                f"{shown(found[option])}", param=name,
            )  # fmt: skip
        read = _READ.get(name)
        value = value if read is None else read(value)
        if value is not None:
            found[option] = value
    return found


def _read_top_k(value: Any) -> Any:
    # -1 turns top_k off in vLLM
    return 0 if value == -1 else value


def _read_bias(value: Any) -> Any:
    """Convert the keys, token ids that are strings in JSON, to int; None if there are none."""
    if not isinstance(value, dict):
        raise Refused(f"logit_bias must be an object, got {shown(value)}", param="logit_bias")
    found = {int(token): bias for token, bias in value.items() if token.isdecimal()}
    # other spellings of a number could give one token two values
    if [*map(str, found)] != [*value]:
        raise Refused(
            f"logit_bias must have token ids as keys, got {shown(value)}", param="logit_bias"
        )
    return found or None


def _read_format(value: Any) -> Any:
    """Returns the JSON schema of a response format; None for plain text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    schema = value.get("json_schema") if kind == "json_schema" else None
    if not isinstance(schema, dict) or schema.get("schema") is None:
        raise Refused(
            "response_format must have type text, json_object, or json_schema with a schema, got "
            f"{shown(value)}", param="response_format",
        )  # fmt: skip
    return schema["schema"]


_READ: dict[str, Callable[[Any], Any]] = {
    "top_k": _read_top_k, "logit_bias": _read_bias, "response_format": _read_format,
}  # fmt: skip
