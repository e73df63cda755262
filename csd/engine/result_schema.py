"""JSON schema of the dict that `Samples.to_dict` returns, with a description of each key."""

from typing import Any


def _list(inside: dict[str, Any], description: str | None = None) -> dict[str, Any]:
    found = {"type": "array", "items": inside}
    return found if description is None else found | {"description": description}


TOKEN = {"type": "integer", "minimum": 0}
COUNT = {"type": "integer", "minimum": 0}
NUMBER = {"type": "number"}
# null for a token that the model or a constraint rules out
LOGPROB = {"type": ["number", "null"]}

_STATS: dict[str, dict[str, Any]] = {
    "prompt_tokens": COUNT | {"description": "tokens of the prompt"},
    "tokens": COUNT | {"description": "tokens drawn"},
    "call_tokens": COUNT | {"description": "tokens drawn for all prompts of the call"},
    "steps": COUNT | {"description": "steps in which the prompt had a sample in flight"},
    "sample_steps": COUNT | {"description": "the same, summed over samples"},
    "nodes_proposed": COUNT | {"description": "drafted tokens that were verified"},
    "nodes_accepted": COUNT | {"description": "drafted tokens that were accepted"},
    "accepted": {
        "type": "object", "additionalProperties": COUNT,
        "description": "accepted tokens by who drafted them",
    },
    "history_tokens": COUNT | {"description": "of past samples that drafts came from"},
    "shared_tokens": COUNT | {"description": "of other prompts that drafts came from"},
    "thoughts_cut": COUNT | {"description": "samples whose thought max_thinking_tokens ended"},
    "history_left_out": COUNT | {"description": "of past samples without room in the graph"},
    "contexts_dropped": COUNT | {"description": "of the call, without room in the graph"},
    "seconds": {
        "type": "object", "additionalProperties": NUMBER,
        "description": "seconds of the call, by phase",
    },
    "peak_memory": {"type": ["integer", "null"], "description": "bytes on a GPU; null on a CPU"},
    "decoder": {
        "enum": ["fused", "module", "own"],
        "description": "csd's own decoder, the model's module with csd's attention, or one that "
        "the user gave",
    },
    "fused_ruled_out": {
        "type": ["string", "null"],
        "description": "the property that ruled out the fused decoder; null where it ran",
    },
    "tokens_per_step": NUMBER | {"description": "tau, tokens over sample_steps"},
}  # fmt: skip

# lists have one entry per sample, and the lists in them one per token
_KEYS: dict[str, dict[str, Any]] = {
    "texts": _list({"type": ["string", "null"]}, "of each sample; null without a tokenizer"),
    "indices": _list(COUNT, "the sample index of each, from which its noise follows"),
    "tokens": _list(_list(TOKEN), "token ids, with the one that ended the sample"),
    "logprobs": _list(
        _list(LOGPROB), "of each token, as it was drawn: behind all constraints and filters; at "
        "temperature 0 as raw_logprobs; null of one without probability",
    ),
    "raw_logprobs": _list(
        _list(LOGPROB), "of each token, of the model itself at temperature 1; null as above"
    ),
    "finish_reasons": _list(
        {"enum": ["stop", "length", "cancelled"]}, "why each sample ended"
    ),
    "stop_reasons": _list(
        {"type": ["string", "integer", "null"]}, "the stop string or end token that ended it"
    ),
    "error": {"type": ["string", "null"], "description": "why the prompt was not served"},
    "sources": _list(
        _list({"enum": ["", "own", "sibling", "prompt", "history", "model"]}),
        'where each token had been drafted from, "" where it had not',
    ),
    "steps": _list(_list({"type": "integer", "minimum": 1}), "the step that drew each token"),
    "forced": _list(
        _list({"type": "boolean"}), "with max_thinking_tokens, whether the spent budget left no "
        "choice; else empty",
    ),
    "top_logprobs": _list(
        _list(_list({
            "type": "array", "prefixItems": [TOKEN, LOGPROB], "items": False, "minItems": 2,
        })),
        "with top_logprobs, pairs of a token id and its raw log-probability, null as above; else "
        "empty",
    ),
    "entropies": _list(
        _list(NUMBER), "with entropy, of the model at each token in nats; else empty"
    ),
    "prompt_logprobs": {
        "type": ["array", "null"], "items": {"type": ["number", "null"]},
        "description": "with prompt_logprobs, raw ones of the prompt's tokens, null of the first "
        "and as above",
    },
    "seed": {"type": "integer", "description": "with which the same samples are drawn again"},
    "prompt_ids": _list(TOKEN, "token ids of the prompt"),
    "stats": {
        "type": "object", "properties": _STATS, "required": [*_STATS],
        "additionalProperties": False, "description": "what the samples took",
    },
}  # fmt: skip

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "csd.Samples.to_dict",
    "type": "object",
    "properties": _KEYS,
    "required": [*_KEYS],
    "additionalProperties": False,
}
