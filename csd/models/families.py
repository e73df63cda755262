"""Differences of families from Llama: fields of `csd.models.config.ModelConfig`."""

from operator import attrgetter as of
from typing import Any

from csd.models.delta_config import DeltaLayers


def head_dim_of(config: Any) -> int:
    own = getattr(config, "head_dim", None)
    return own or config.hidden_size // config.num_attention_heads


def _rotary_dim(config: Any) -> int:
    return int(head_dim_of(config) * (config.rope_parameters.get("partial_rotary_factor") or 1))


# fields of a family: values, or functions of a `transformers` config
OLMO = dict(qk_norm=True, whole_qk_norm=True, norms="post")
GEMMA = dict(
    norms="both", plus_one=True, gelu=True, embedding_scale=lambda c: c.hidden_size**0.5,
    scale=lambda c: c.query_pre_attn_scalar**-0.5, final_cap=of("final_logit_softcapping"),
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": dict(qkv_bias=True),
    "qwen3": dict(qk_norm=True),
    "qwen3_moe": dict(
        qk_norm=True, intermediate=of("moe_intermediate_size"), experts=of("num_experts"),
        experts_per_token=of("num_experts_per_tok"), experts_sum_to_one=of("norm_topk_prob"),
    ),
    "smollm3": dict(rotated=of("no_rope_layers")),
    "granite": dict(
        scale=of("attention_multiplier"), embedding_scale=of("embedding_multiplier"),
        residual_scale=of("residual_multiplier"), logit_divisor=of("logits_scaling"),
    ),
    "phi3": dict(joined=True, rotary_dim=_rotary_dim),
    "olmo2": OLMO,
    "olmo3": OLMO,
    "gemma2": GEMMA | dict(softcap=of("attn_logit_softcapping")),
    "gemma3_text": GEMMA | dict(qk_norm=True),
    "qwen3_5_text": dict(
        qk_norm=True, plus_one=True, gated=True, rotary_dim=_rotary_dim, delta=DeltaLayers.of,
    ),
}  # fmt: skip
