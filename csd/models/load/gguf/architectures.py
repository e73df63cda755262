"""Architectures of GGUF files that csd reads, by their differences from Llama's.

llama.cpp's loader of an architecture defines the meaning of its keys, and the default of a key that
is missing. Comments name the defaults that differ from those of the model's config.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from csd.models.fused.rope import FULL, LOCAL

Fields = dict[str, Any]
Neutral = Callable[[Any, Fields], bool]
Shape = tuple[int, ...]


def one_of(*values: object) -> Neutral:
    return lambda value, _: any(value == v for v in values)


@dataclass(frozen=True, slots=True)
class Architecture:
    """Definition of a model by a file's keys and tensors, beyond those of Llama's.

    families: model types of the models that converters write as this architecture; the first is
    that of the `transformers` config. whole, real: further key -> field of the config that it
    becomes, a whole or any number above 0. defaults: fields whose keys a file may leave out.
    neutral: further key -> function that is True if csd computes with a value, or it changes
    nothing. read: of these, the keys with which csd computes. finish: changes the fields by them,
    given the keys below the architecture and the factors of LongRoPE. groups: names in `_GROUPS` of
    a layer's tensors. shift: added to weights of norms in the file.
    """

    families: tuple[str, ...]
    whole: Mapping[str, str] = field(default_factory=dict)
    real: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    neutral: Mapping[str, Neutral] = field(default_factory=dict)
    finish: Callable[[Fields, dict, dict[str, list[float]]], None] = lambda *_: None
    read: tuple[str, ...] = ()
    groups: tuple[str, ...] = ("norms", "qkv", "mlp")
    paired: bool = False  # rotary embedding pairs neighbouring rows of queries and keys in the file
    scaled: bool = False  # the config has the rotary embedding's scaling
    shift: float = 0.0

    @property
    def keys(self) -> dict[str, str]:
        """Further keys and their fields."""
        return {**self.whole, **self.real}

    def tensors(self, c: Any) -> dict[str, tuple[str, Shape]]:
        """A layer's tensors in the file, with their names in the module and shapes, for a config.

        A name in the module that several have is of one matrix, which they fill in order.
        """
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        sizes = dict(hidden=c.hidden_size, head=c.head_dim, q=q, kv=kv, qkv=q + 2 * kv)
        sizes |= dict(width=c.intermediate_size, both=2 * c.intermediate_size)
        if "experts" in self.groups:
            sizes |= dict(experts=c.num_experts, expert=c.moe_intermediate_size)
        return {
            name: (place, tuple(sizes[size] for size in shape.split()))
            for group in self.groups
            for name, place, shape in _GROUPS[group]
        }


# groups of a layer's tensors: names in the file and in the module below `model.layers.i.`, and
# dimensions by their names in `Architecture.tensors`
_GROUPS = {
    "norms": (
        ("attn_norm.weight", "input_layernorm.weight", "hidden"),
        ("ffn_norm.weight", "post_attention_layernorm.weight", "hidden"),
    ),
    # before and after attention and feed-forward layer
    "both_norms": (
        ("attn_norm.weight", "input_layernorm.weight", "hidden"),
        ("post_attention_norm.weight", "post_attention_layernorm.weight", "hidden"),
        ("ffn_norm.weight", "pre_feedforward_layernorm.weight", "hidden"),
        ("post_ffw_norm.weight", "post_feedforward_layernorm.weight", "hidden"),
    ),
    "qkv": (
        ("attn_q.weight", "self_attn.q_proj.weight", "q hidden"),
        ("attn_k.weight", "self_attn.k_proj.weight", "kv hidden"),
        ("attn_v.weight", "self_attn.v_proj.weight", "kv hidden"),
        ("attn_output.weight", "self_attn.o_proj.weight", "hidden q"),
    ),
    "qkv_biases": (
        ("attn_q.bias", "self_attn.q_proj.bias", "q"),
        ("attn_k.bias", "self_attn.k_proj.bias", "kv"),
        ("attn_v.bias", "self_attn.v_proj.bias", "kv"),
    ),
    "qk_norms": (
        ("attn_q_norm.weight", "self_attn.q_norm.weight", "head"),
        ("attn_k_norm.weight", "self_attn.k_norm.weight", "head"),
    ),
    "mlp": (
        ("ffn_gate.weight", "mlp.gate_proj.weight", "width hidden"),
        ("ffn_up.weight", "mlp.up_proj.weight", "width hidden"),
        ("ffn_down.weight", "mlp.down_proj.weight", "hidden width"),
    ),
    "experts": (
        ("ffn_gate_inp.weight", "mlp.gate.weight", "experts hidden"),
        ("ffn_gate_exps.weight", "mlp.experts.gate_up_proj", "experts expert hidden"),
        ("ffn_up_exps.weight", "mlp.experts.gate_up_proj", "experts expert hidden"),
        ("ffn_down_exps.weight", "mlp.experts.down_proj", "experts hidden expert"),
    ),
    # queries, keys and values in one matrix, and both halves of the feed-forward layer
    "joined": (
        ("attn_qkv.weight", "self_attn.qkv_proj.weight", "qkv hidden"),
        ("attn_output.weight", "self_attn.o_proj.weight", "hidden q"),
        ("ffn_up.weight", "mlp.gate_up_proj.weight", "both hidden"),
        ("ffn_down.weight", "mlp.down_proj.weight", "hidden width"),
    ),
}


def _experts(fields: Fields, own: dict, _: dict) -> None:
    # llama.cpp's value for files without the key
    width = fields["intermediate_size"] // fields["num_experts_per_tok"]
    fields.setdefault("moe_intermediate_size", width)
    fields |= dict(norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])


def _phi3(fields: Fields, own: dict, factors: dict[str, list[float]]) -> None:
    # llama.cpp ignores the window, with a warning that results may be worse; the model has it
    fields["sliding_window"] = own.get("attention.sliding_window") or None
    dims, head = own.get("rope.dimension_count", fields["head_dim"]), fields["head_dim"]
    # transformers rounds the product with the head's size down
    share = 1.0 if dims == head else math.nextafter(dims / head, 1)
    rope = fields["rope_parameters"]
    rope["partial_rotary_factor"] = share
    if factors:
        rope |= dict(
            rope_type="longrope",
            short_factor=factors["short"],
            long_factor=factors["long"],
            attention_factor=float(own.get("rope.scaling.attn_factor", 1.0)),
            original_max_position_embeddings=own.get(
                "rope.scaling.original_context_length", fields["max_position_embeddings"]
            ),
        )


# layers of the largest model, whose scores are scaled by another number than the size of its heads
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}


def _gemma(fields: Fields, own: dict, _: dict) -> None:
    scale = fields["head_dim"]
    if fields["num_hidden_layers"] == _LAYERS_OF_27B[fields["model_type"]]:
        scale = fields["hidden_size"] // fields["num_attention_heads"]
    fields["query_pre_attn_scalar"] = scale


def _gemma2(fields: Fields, own: dict, factors: dict[str, list[float]]) -> None:
    _gemma(fields, own, factors)
    fields["layer_types"] = _every(2, fields["num_hidden_layers"])


def _gemma3(fields: Fields, own: dict, factors: dict[str, list[float]]) -> None:
    _gemma(fields, own, factors)
    period, window = own.get("attention.sliding_window_pattern", 6), "attention.sliding_window"
    # without a window every layer attends to all
    period = period if own.get(window) else 1
    # transformers needs a number, which no such layer has a use for
    fields["sliding_window"] = own.get(window) or fields["max_position_embeddings"]
    fields["layer_types"] = _every(period, fields["num_hidden_layers"])
    theta, divisor = fields["rope_parameters"]["rope_theta"], linear_factor(own)
    scaling = dict(rope_type="linear", factor=divisor) if divisor != 1 else {}
    local = dict(rope_type="default", rope_theta=float(own.get("rope.freq_base_swa", 10000.0)))
    fields["rope_parameters"] = {
        FULL: dict(rope_type="default", rope_theta=theta) | scaling,
        LOCAL: local,
    }
    fields["final_logit_softcapping"] = own.get("final_logit_softcapping") or None


def _every(period: int, layers: int) -> list[str]:
    """Kinds of layers, of which the last of each `period` attends to all keys."""
    return [LOCAL if (i + 1) % period else FULL for i in range(layers)]


def linear_factor(own: dict[str, Any]) -> float:
    """Divisor of the rotary frequencies in linear scaling, of the keys below an architecture; 1
    without scaling."""
    if own.get("rope.scaling.type") == "none":
        return 1.0
    return float(own.get("rope.scaling.factor", own.get("rope.scale_linear", 0)) or 1)


def _is_whole(least: int) -> Neutral:
    return lambda value, _: type(value) is int and value >= least


def _is_number(value: Any, _: Fields) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


# the scale that the fields have in the end
_SCALE: dict[str, Neutral] = {
    "attention.scale": lambda value, fields: (
        value == 0 or math.isclose(value, fields["query_pre_attn_scalar"] ** -0.5, rel_tol=1e-6)
    )
}
ARCHITECTURES = {
    # rows of queries and keys are in the order of Meta's own files
    "llama": Architecture(("llama", "mistral"), paired=True),
    "qwen2": Architecture(("qwen2",), groups=("norms", "qkv", "qkv_biases", "mlp")),
    "qwen3": Architecture(("qwen3",), groups=("norms", "qkv", "qk_norms", "mlp")),
    "qwen3moe": Architecture(
        ("qwen3_moe",),
        whole={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        defaults={"moe_intermediate_size": None},
        # weights of a token's experts are always a softmax with sum 1
        neutral={"expert_weights_norm": one_of(1), "expert_gating_func": one_of(0, 1)},
        finish=_experts,
        groups=("norms", "qkv", "qk_norms", "experts"),
    ),
    "phi3": Architecture(
        ("phi3",),
        neutral={
            "attention.sliding_window": _is_whole(0),
            "rope.dimension_count": lambda value, fields: (
                type(value) is int and 0 < value <= fields["head_dim"] and value % 2 == 0
            ),
            "rope.scaling.attn_factor": lambda value, fields: (
                _is_number(value, fields)
                and value in (fields["rope_parameters"].get("attention_factor", 1.0), 1)
            ),
            "rope.scaling.original_context_length": _is_whole(1),
            # beside the tensors with its factors
            "rope.scaling.type": lambda value, fields: (
                value in ("none", "linear")
                or (value == "longrope" and fields["rope_parameters"]["rope_type"] == value)
            ),
        },
        finish=_phi3,
        read=(
            "attention.sliding_window",
            "rope.dimension_count",
            "rope.scaling.attn_factor",
            "rope.scaling.original_context_length",
        ),
        groups=("norms", "joined"),
    ),
    "gemma2": Architecture(
        ("gemma2",),
        whole={"attention.sliding_window": "sliding_window"},
        real={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        defaults={
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        neutral=_SCALE | {"attention.sliding_window_pattern": one_of(2)},
        finish=_gemma2,
        groups=("both_norms", "qkv", "mlp"),
        shift=1.0,
    ),
    "gemma3": Architecture(
        ("gemma3_text",),
        neutral=_SCALE
        | {
            "attention.sliding_window": _is_whole(0),
            "attention.sliding_window_pattern": _is_whole(1),
            "final_logit_softcapping": _is_number,
            "rope.freq_base_swa": lambda value, fields: _is_number(value, fields) and value > 0,
        },
        finish=_gemma3,
        read=(
            "attention.sliding_window",
            "attention.sliding_window_pattern",
            "final_logit_softcapping",
            "rope.freq_base_swa",
        ),
        groups=("both_norms", "qkv", "qk_norms", "mlp"),
        scaled=True,
        shift=1.0,
    ),
}
