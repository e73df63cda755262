"""Model keys of a GGUF file: the config that they define, and values that csd does not compute.

llama.cpp's loader of an architecture defines the meaning of a key. Each `<architecture>.*` key of a
file is in `USED`, or does not enter the computation, or must have a value that changes nothing.
"""

import math
from typing import Any

from csd.models.load.gguf.architectures import (
    ARCHITECTURES,
    Fields,
    Neutral,
    linear_factor,
    one_of,
)
from csd.models.load.gguf.header import below

# key after `<architecture>.` -> field of the config
USED = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_OPTIONAL = {"attention.head_count_kv", "attention.key_length", "rope.freq_base"}
_REAL = {"attention.layer_norm_rms_epsilon", "rope.freq_base"}

# keys that no computation of these architectures reads
NO_VALUE = {
    "attention.layer_norm_epsilon",
    "rope.scaling.finetuned",
    # keys of YaRN and LongRoPE, whose types are refused
    "rope.scaling.original_context_length",
}


def _same_as(field: str, *others: object) -> Neutral:
    return lambda value, sizes: value in (sizes[field], *others)


# key after `<architecture>.` -> function that is True if a value changes nothing
NEUTRAL: dict[str, Neutral] = {
    "vocab_size": _same_as("vocab_size"),
    "attention.value_length": _same_as("head_dim"),
    "rope.dimension_count": _same_as("head_dim"),
    "embedding_length_out": _same_as("hidden_size", 0),
    "attention.scale": lambda value, sizes: (
        value == 0 or math.isclose(value, sizes["head_dim"] ** -0.5, rel_tol=1e-6)
    ),
    "attention.sliding_window": lambda value, sizes: (
        value == 0 or value >= sizes["max_position_embeddings"]
    ),
    "attention.causal": one_of(True),
    "hidden_activation": one_of("silu"),
    "rope.scaling.type": one_of("none", "linear"),
    "rope.scaling.attn_factor": one_of(1),
    # a number above 0 divides the rotary frequencies: `frequency_divisor`
    "rope.scaling.factor": lambda value, _: math.isfinite(value) and value >= 0,
    "rope.scale_linear": lambda value, _: math.isfinite(value) and value >= 0,
    "rope.scaling.yarn_ext_factor": one_of(0),
    "rope.scaling.yarn_attn_factor": one_of(1),
    "rope.scaling.yarn_log_multiplier": one_of(0),
    # a key of LLaMA's first converter: the order of rows that the architecture has anyway
    "tensor_data_layout": one_of("Meta AI original pth"),
    **dict.fromkeys(
        (
            "attention.output_scale",
            "attention.value_scale",
            "embedding_scale",
            "expert_weights_scale",
            "logit_scale",
            "residual_scale",
        ),
        one_of(0, 1),
    ),
    **dict.fromkeys(
        (
            "attention.clamp_kqv",
            "attention.max_alibi_bias",
            "attention.shared_kv_layers",
            "attn_logit_softcapping",
            "classifier.pooling_type",
            "expert_count",
            "expert_feed_forward_length",
            "expert_gating_func",
            "expert_group_count",
            "expert_group_used_count",
            "expert_shared_count",
            "expert_shared_feed_forward_length",
            "expert_used_count",
            "expert_weights_norm",
            "final_logit_softcapping",
            "interleave_moe_layer_step",
            "leading_dense_block_count",
            "moe_every_n_layers",
            "n_deepstack_layers",
            "nextn_predict_layers",
            "pooling_type",
            "router_logit_softcapping",
            "use_parallel_residual",
        ),
        one_of(0),
    ),
}

# keys outside the architecture -> the values that change nothing
_OF_THE_FILE = {
    "general.type": ("model",),
    "split.count": (0, 1),
}
# prefixes for adapters, image encoders and other ways to draw, which a text decoder lacks
_FOREIGN = ("adapter.", "clip.", "diffusion.", "xielu.")


def config_fields(
    keys: dict[str, Any], vocab: int, factors: dict[str, list[float]] | None = None
) -> Fields:
    """Fields of the `transformers` config of a file with these keys and `vocab` embeddings.

    keys: values by full name; the values of the tokenizer's arrays are not read. factors: "short"
    and "long" of LongRoPE, which are tensors. Raises ValueError, naming keys and values, for those
    that csd does not compute.
    """
    architecture = keys.get("general.architecture")
    if architecture not in ARCHITECTURES:
        text = f"its general.architecture={architecture!r} is not supported, of files only"
        raise ValueError(f"{text} {', '.join(ARCHITECTURES)}")
    differs, own = ARCHITECTURES[architecture], own_keys(keys)
    fields: Fields = {"model_type": differs.families[0], "vocab_size": vocab, "pad_token_id": None}
    fields |= {name: value for name, value in differs.defaults.items() if value is not None}
    for key, field in (USED | differs.keys).items():
        if key in own:
            real = key in _REAL or key in differs.real
            fields[field] = _number(f"{architecture}.{key}", own[key], real)
        elif key not in _OPTIONAL and field not in differs.defaults:
            raise ValueError(f"it lacks the key {architecture}.{key}")
    heads = fields["num_attention_heads"]
    fields.setdefault("num_key_value_heads", heads)
    # the rotary embedding spans the head, but for a part of Phi's
    size = fields["hidden_size"] // heads
    if "rope.dimension_count" not in differs.neutral:
        size = own.get("rope.dimension_count", size)
    fields.setdefault("head_dim", _number(f"{architecture}.rope.dimension_count", size, False))
    theta = fields.pop("rope_theta", 10000.0)
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    try:
        differs.finish(fields, own, factors or {})
    finally:
        # also after an error: a value of another kind than the key's is named
        _refuse(keys, architecture, own, fields)
    return fields


def own_keys(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys below the file's architecture, without its name."""
    return below(keys, f"{keys.get('general.architecture')}.")


def frequency_divisor(keys: dict[str, Any]) -> float:
    """Divisor of the module's rotary frequencies; 1 if its config has the scaling."""
    is_known = ARCHITECTURES[keys["general.architecture"]].scaled
    return 1.0 if is_known else linear_factor(own_keys(keys))


def _number(key: str, value: Any, real: bool) -> int | float:
    kinds = (int, float) if real else (int,)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
        expected = "a number" if real else "a whole number"
        raise ValueError(f"its {key} must be {expected} above 0 for all layers, got {value!r}")
    return value


def _refuse(keys: dict[str, Any], architecture: str, own: dict[str, Any], fields: Fields) -> None:
    differs = ARCHITECTURES[architecture]
    read = USED.keys() | differs.keys.keys() | NO_VALUE - differs.neutral.keys()
    neutral = NEUTRAL | dict(differs.neutral)
    wrong = [
        f"{architecture}.{key}={value!r}"
        for key, value in own.items()
        if key not in read and not _changes_nothing(neutral.get(key), value, fields)
    ]
    wrong += [
        f"{key}={value!r}"
        for key, value in keys.items()
        if key.startswith(_FOREIGN) or value not in _OF_THE_FILE.get(key, (value,))
    ]
    if wrong:
        raise ValueError(f"csd does not implement these of its keys: {', '.join(wrong)}")


def _changes_nothing(neutral: Neutral | None, value: Any, fields: Fields) -> bool:
    try:
        return neutral is not None and neutral(value, fields)
    # a list or a text in place of a number, or fields that such a value has left out
    except (TypeError, KeyError):
        return False
