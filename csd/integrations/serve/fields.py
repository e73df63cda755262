"""Fields of a request, and the engine's option for each. Every other field is refused by name."""

from collections.abc import Callable, Mapping
from typing import Any

from csd.integrations.serve.errors import Refused
from csd.integrations.serve.field_names import SAMPLING
from csd.integrations.serve.unsupported import IGNORED, asks_for_nothing, instead
from csd.utils.check import shown

# fields of the server itself
COMMON = ("model", "stream", "stream_options", "return_token_ids")
# fields that are passed to a chat template, if it reads them
TEMPLATE = {"tools": list, "reasoning_effort": str}
CHAT = (
    "messages", "logprobs", "top_logprobs", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", *TEMPLATE,
)  # fmt: skip
COMPLETIONS = ("prompt", "logprobs", "echo")


def check_fields(
    body: Mapping[str, Any], own: tuple[str, ...], nothing: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """Returns the fields of a body that have an effect.

    own: fields of this endpoint only. nothing: values that ask for nothing, by field.

    Raises Refused, naming the field, for an unsupported one.
    """
    known = {*SAMPLING, *COMMON, *own}
    found = {}
    for name, value in body.items():
        if name in IGNORED or asks_for_nothing(name, value, nothing):
            continue
        if name not in known:
            raise Refused(
                f"{name} is not supported, got {shown(value)}{instead(name, known)}", param=name
            )
        found[name] = value
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
