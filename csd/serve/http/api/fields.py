"""Fields of a request, and the engine's option for each. Every other field is refused by name.

Fields of OpenAI's API and of vLLM that are not supported: one that has no effect on samples is
ignored whatever its value (`IGNORED`). A value without effect, often a client's default, is
accepted as if the field were absent (`NOTHING`), as null is for every field. Every other value is
refused, with what to use instead if there is something (`INSTEAD`), so that no option of a client
is silently dropped.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from csd.serve.http.errors import Refused, wrong
from csd.serve.http.names import SAMPLING, as_fields
from csd.utils.check import shown
from csd.utils.other_names import similar

IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "prompt_cache_options", "prediction", "priority", "session_id"),
)

# field -> values without effect in any request
NOTHING: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "tools": ([],),
    # OpenAI's default is "none" without tools, else "auto"
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    # a completion has a number here
    "logprobs": (False,),
    # vLLM's
    "seed": (-1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True,),
    "truncation_side": ("left",),
    "watermarking": (False,),
    "include_reasoning": (True,),
    "logprob_token_ids": ([],),
    "return_tokens_as_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "routed_experts_prompt_start": (0,),
    "stream_interval": (1,),
    "documents": ([],),
    "structured_outputs": ({},),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "mm_payload": ("tensors",),
    "return_mm_kwargs": (False,),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
}
# the same for chats: a chat template writes its own special tokens
NOTHING_IN_CHAT = NOTHING | {
    "add_special_tokens": (False,),
    "tool_choice": (),
    "parallel_tool_calls": (True,),
}
NOTHING_IN_COMPLETIONS = NOTHING | {"add_special_tokens": (True,)}
NOTHING_IN_RESPONSES = NOTHING_IN_CHAT | {
    "n": (1,),
    "background": (False,),
    "include": ([],),
    "store": (False,),
    "text": ({},),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
}
# the same if the chat template does not read the field: one that does may have another default
NOTHING_IF_UNREAD = {"reasoning_effort": ("medium",)}
NOTHING_IN_STREAM_OPTIONS: dict[str, tuple[Any, ...]] = {
    "include_usage": (False,),
    "include_obfuscation": (False,),
    "continuous_usage_stats": (False,),
}

INSTEAD = {
    "best_of": "n is the number of choices",
    "prompt_logprobs": "echo with logprobs in /v1/completions returns those of the prompt",
    "functions": "use tools",
    "function_call": "use tools",
    "guided_json": "use response_format",
    "guided_regex": "use regex",
    "guided_choice": "use regex, such as 'yes|no'",
    "guided_grammar": "use grammar",
    "structured_outputs": "use response_format, regex or grammar",
}
_WHOLE = "send the whole conversation as input, since no response is stored"
INSTEAD_IN_RESPONSES = INSTEAD | {
    "n": "/v1/chat/completions has several choices",
    "messages": "use input",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "response_format": "use text.format",
    "reasoning_effort": "use reasoning.effort",
    "guided_json": "use text.format",
    "structured_outputs": "use text.format, regex or grammar",
    "previous_response_id": _WHOLE,
    "conversation": _WHOLE,
    "store": "no response is stored",
}


def asks_for_nothing(name: str, value: Any, nothing: Mapping[str, tuple[Any, ...]]) -> bool:
    """True if a field's value has the same effect as its absence."""
    # False equals 0, but asks for something else
    return value is None or any(
        value == one and isinstance(value, bool) == isinstance(one, bool)
        for one in nothing.get(name, ())
    )


def instead(name: str, known: Collection[str], hints: Mapping[str, str] = INSTEAD) -> str:
    """Clause of an error: the field to use instead of an unsupported one; "" if none is known."""
    if name in hints:
        return f"; {hints[name]}"
    # clients may know the option by its name in another library
    meant = similar(name, {*known, *SAMPLING.values()})
    field = None if meant is None else as_fields(meant)
    return f"; did you mean {field}?" if field in known and field != name else ""


# fields of the server itself
COMMON = ("model", "stream", "stream_options", "return_token_ids")
# fields that are passed to a chat template, if it reads them
TEMPLATE = {"tools": list, "reasoning_effort": str}
CHAT = (
    *("messages", "logprobs", "top_logprobs", "chat_template_kwargs", "add_generation_prompt"),
    *("continue_final_message", "tool_choice", "parallel_tool_calls", *TEMPLATE),
)
COMPLETIONS = ("prompt", "logprobs", "echo")
RESPONSES = (
    *("input", "instructions", "max_output_tokens", "text", "reasoning", "include"),
    *("top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
)
# fields of both other endpoints that a response has by other names, or not at all
NO_RESPONSES = ("n", "max_tokens", "max_completion_tokens", "response_format", "return_token_ids")


def check_fields(
    body: Mapping[str, Any],
    own: tuple[str, ...],
    nothing: Mapping[str, tuple[Any, ...]],
    without: tuple[str, ...] = (),
    hints: Mapping[str, str] = INSTEAD,
) -> dict[str, Any]:
    """Returns the fields of a body that have an effect.

    own: fields of this endpoint only. nothing: values without effect, by field. without: fields
    that this endpoint does not have. hints: what to use instead of an unsupported field.

    Raises Refused, naming the field, for an unsupported one.
    """
    known = {*SAMPLING, *COMMON, *own} - {*without}
    fields = {}
    for name, value in body.items():
        ignored = name in IGNORED and name not in nothing
        if ignored or asks_for_nothing(name, value, nothing):
            continue
        if name not in known:
            about = f"{name} is not supported, got {shown(value)}{instead(name, known, hints)}"
            raise Refused(about, param=name)
        fields[name] = value
    return fields


def options_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert fields to options of the engine. Raises Refused."""
    options: dict[str, Any] = {}
    for name, option in SAMPLING.items():
        if name not in fields:
            continue
        value = fields[name]
        if option in options and options[option] != value:
            both = f"{shown(value)} and {shown(options[option])}"
            raise Refused(f"{name} must equal max_tokens if both are given, got {both}", param=name)
        value = _READ[name](value) if name in _READ else value
        if value is not None:
            options[option] = value
    return options


def _read_bias(value: Any) -> Any:
    """Convert the keys, token ids that are strings in JSON, to int; None if there are none."""
    if not isinstance(value, dict):
        raise wrong("logit_bias", "an object", value)
    biases = {int(token): bias for token, bias in value.items() if token.isdecimal()}
    # other spellings of a number could give one token two values
    if [*map(str, biases)] != [*value]:
        raise Refused(
            f"logit_bias must have token ids as keys, got {shown(value)}", param="logit_bias"
        )
    return biases or None


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
            f"{shown(value)}",
            param="response_format",
        )
    return schema["schema"]


_READ: dict[str, Callable[[Any], Any]] = {
    # -1 turns top_k off in vLLM
    "top_k": lambda value: 0 if value == -1 else value,
    "logit_bias": _read_bias,
    "response_format": _read_format,
}
