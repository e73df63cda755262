"""Modules of a `transformers` layer by their role in the fused decoder."""

from typing import Any

from csd.models.config import ModelConfig
from csd.models.rope_config import FULL, LOCAL


def products_of(config: ModelConfig, layer: Any) -> dict[str, list[Any]]:
    """Linear layers that make up each fused product, by its name; none for experts."""
    mlp = layer.mlp
    if is_delta(layer):
        d = layer.linear_attn
        qkv = [d.in_proj_qkv, d.in_proj_z, d.in_proj_b, d.in_proj_a]
        gate_up = [mlp.gate_proj, mlp.up_proj]
        return {"qkv": qkv, "out": [d.out_proj], "gate_up": gate_up, "down": [mlp.down_proj]}
    a = layer.self_attn
    qkv = [a.qkv_proj] if config.joined else [a.q_proj, a.k_proj, a.v_proj]
    found = {"qkv": qkv, "out": [a.o_proj], "gate_up": [], "down": []}
    if config.experts:
        return found
    gate_up = [mlp.gate_up_proj] if config.joined else [mlp.gate_proj, mlp.up_proj]
    return found | {"gate_up": gate_up, "down": [mlp.down_proj]}


def is_delta(layer: Any) -> bool:
    """True if a layer is a gated delta net."""
    return hasattr(layer, "linear_attn")


def norms_of(config: ModelConfig, layer: Any) -> dict[str, Any]:
    """Norms of a layer by the field names of a decoder's `Layer`."""
    found = {ours: getattr(layer, theirs) for ours, theirs in NORMS[config.norms].items()}
    if is_delta(layer):
        return found
    a = layer.self_attn
    return found | (dict(q_norm=a.q_norm, k_norm=a.k_norm) if config.qk_norm else {})


def experts_of(layer: Any) -> dict[str, Any]:
    """Parameters of a layer's experts by the field names of `csd.models.experts.Experts`."""
    mlp = layer.mlp
    return dict(
        router=mlp.gate.weight, gate_up=mlp.experts.gate_up_proj, down=mlp.experts.down_proj
    )


def embedding_scale_of(embedding: Any) -> float | None:
    """Factor by which a module's embedding multiplies its rows; None if it does not."""
    scale = getattr(embedding, "embed_scale", None)
    return None if scale is None else float(scale.to(embedding.weight.dtype))


def frequencies_of(rotary: Any) -> list[Any]:
    """Frequency buffers of a module's rotary embedding; a second one if local layers differ."""
    if getattr(rotary, "rope_type", None) == "longrope":
        # the frequencies of short texts; the module swaps the others in as it runs
        return [rotary.original_inv_freq]
    if hasattr(rotary, "inv_freq"):
        return [rotary.inv_freq]
    kinds = [kind for kind in (FULL, LOCAL) if hasattr(rotary, f"{kind}_inv_freq")]
    return [getattr(rotary, f"{kind}_inv_freq") for kind in kinds]


NORMS = {
    "pre": dict(input_norm="input_layernorm", post_norm="post_attention_layernorm"),
    "post": (
        POST := dict(
            attention_norm="post_attention_layernorm", mlp_norm="post_feedforward_layernorm"
        )
    ),
    "both": POST | dict(input_norm="input_layernorm", post_norm="pre_feedforward_layernorm"),
}
