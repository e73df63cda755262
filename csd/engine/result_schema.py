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
    "prompt_tokens": COUNT | {"description": "number of prompt tokens"},
    "tokens": COUNT | {"description": "number of sampled tokens"},
    "call_tokens": COUNT | {"description": "number of sampled tokens of all prompts of the call"},
    "steps": COUNT | {"description": "number of steps in which the prompt had a sample in flight"},
    "sample_steps": COUNT | {"description": "the number of steps, summed over samples"},
    "nodes_proposed": COUNT | {"description": "number of drafted tokens that were verified"},
    "nodes_accepted": COUNT | {"description": "number of drafted tokens that were accepted"},
    "accepted": {
        "type": "object",
        "additionalProperties": COUNT,
        "description": "number of accepted tokens by the source of the draft",
    },
    "history_tokens": COUNT | {"description": "number of tokens of past samples used for drafts"},
    "shared_tokens": COUNT
    | {"description": "number of tokens of other prompts' samples used for drafts"},
    "thoughts_cut": COUNT
    | {"description": "number of samples whose thought was ended by max_thinking_tokens"},
    "history_left_out": COUNT
    | {"description": "number of tokens of past samples that did not fit in the graph"},
    "contexts_dropped": COUNT
    | {"description": "number of contexts of the whole call that did not fit in the graph"},
    "seconds": {
        "type": "object",
        "additionalProperties": NUMBER,
        "description": "seconds of the call, by phase",
    },
    "peak_memory": {
        "type": ["integer", "null"],
        "description": "peak memory on a GPU in bytes; null on a CPU",
    },
    "decoder": {
        "enum": ["fused", "module", "own"],
        "description": "decoder that ran: csd's own (fused), the model's module with csd's "
        "attention (module), or one given by the user (own)",
    },
    "fused_ruled_out": {
        "type": ["string", "null"],
        "description": "property of the model that the fused decoder does not support; null if "
        "the fused decoder ran",
    },
    "tokens_per_step": NUMBER | {"description": "tau: tokens divided by sample_steps"},
}

# lists have one entry per sample, and the lists in them one per token
_KEYS: dict[str, dict[str, Any]] = {
    "texts": _list({"type": ["string", "null"]}, "text of each sample; null without a tokenizer"),
    "indices": _list(COUNT, "index of each sample, which determines its random noise"),
    "tokens": _list(_list(TOKEN), "token ids of each sample, including the token that ended it"),
    "logprobs": _list(
        _list(LOGPROB),
        "log-probability of each token in the distribution it was drawn from, "
        "after all constraints and filters; at temperature 0 equal to "
        "raw_logprobs; null for a token without probability",
    ),
    "raw_logprobs": _list(
        _list(LOGPROB),
        "log-probability of each token under the model at temperature 1; null for "
        "a token without probability",
    ),
    "finish_reasons": _list(
        {"enum": ["stop", "length", "cancelled", "error"]}, "reason why each sample ended"
    ),
    "stop_reasons": _list(
        {"type": ["string", "integer", "null"]}, "stop string or end token that ended each sample"
    ),
    "error": {
        "type": ["string", "null"],
        "description": "reason why the prompt was not served, or the first of its samples' errors, "
        "else null",
    },
    "errors": _list(
        {"type": ["string", "null"]}, "reason why each sample could not continue, else null"
    ),
    "sources": _list(
        _list({"enum": ["", "own", "sibling", "prompt", "history", "model"]}),
        'source of the draft of each token; "" for a token that was not drafted',
    ),
    "steps": _list(
        _list({"type": "integer", "minimum": 1}), "number of the step that drew each token"
    ),
    "forced": _list(
        _list({"type": "boolean"}),
        "with max_thinking_tokens, whether each token was forced "
        "because the thinking budget was spent; else empty",
    ),
    "top_logprobs": _list(
        _list(
            _list(
                {
                    "type": "array",
                    "prefixItems": [TOKEN, LOGPROB],
                    "items": False,
                    "minItems": 2,
                }
            )
        ),
        "with top_logprobs, pairs of a token id and its raw log-probability, null without "
        "probability; else empty",
    ),
    "entropies": _list(
        _list(NUMBER),
        "with entropy, entropy of the model's distribution at each token, in nats; else empty",
    ),
    "prompt_logprobs": {
        "type": ["array", "null"],
        "items": {"type": ["number", "null"]},
        "description": "with prompt_logprobs, raw log-probabilities of the prompt's tokens; null "
        "for the first token and for a token without probability",
    },
    "seed": {"type": "integer", "description": "random seed; the same seed draws the same samples"},
    "prompt_ids": _list(TOKEN, "token ids of the prompt"),
    "stats": {
        "type": "object",
        "properties": _STATS,
        "required": [*_STATS],
        "additionalProperties": False,
        "description": "statistics of the samples and of the call",
    },
}

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "csd.Samples.to_dict",
    "type": "object",
    "properties": _KEYS,
    "required": [*_KEYS],
    "additionalProperties": False,
}
