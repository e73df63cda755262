"""Modules and values of a `transformers` layer, by their role in the fused decoder.

`values` pairs values of a module that its config may not show with the fused decoder's values.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from csd.models.fused.config import ModelConfig, scale_of
from csd.models.fused.rope import FULL, LOCAL


def products_of(config: ModelConfig, layer: Any) -> dict[str, list[Any]]:
    """Linear layers that make up each fused product, by its name; none for experts."""
    if is_delta(layer):
        d = layer.linear_attn
        qkv, out = [d.in_proj_qkv, d.in_proj_z, d.in_proj_b, d.in_proj_a], d.out_proj
    else:
        a = layer.self_attn
        qkv = [a.qkv_proj] if config.joined else [a.q_proj, a.k_proj, a.v_proj]
        out = a.o_proj
    if config.experts:
        return {"qkv": qkv, "out": [out], "gate_up": [], "down": []}
    mlp = layer.mlp
    gate_up = [mlp.gate_up_proj] if config.joined else [mlp.gate_proj, mlp.up_proj]
    return {"qkv": qkv, "out": [out], "gate_up": gate_up, "down": [mlp.down_proj]}


def is_delta(layer: Any) -> bool:
    """True if a layer is a gated delta net."""
    return hasattr(layer, "linear_attn")


def norms_of(config: ModelConfig, layer: Any) -> dict[str, Any]:
    """Norms of a layer by the field names of a decoder's `Layer`."""
    norms = {ours: getattr(layer, theirs) for ours, theirs in NORMS[config.norms].items()}
    if is_delta(layer):
        return norms
    a = layer.self_attn
    return norms | (dict(q_norm=a.q_norm, k_norm=a.k_norm) if config.qk_norm else {})


def experts_of(layer: Any) -> dict[str, Any]:
    """Parameters of a layer's experts by the field names of `csd.models.fused.experts.Experts`."""
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


def values(model: Any, c: ModelConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, the module's value, and the value that the fused decoder computes with."""
    inner = model.model
    yield "len(model.layers)", len(inner.layers), c.layers
    yield "model.embed_tokens.max_norm", inner.embed_tokens.max_norm, None
    scale = getattr(inner, "embedding_multiplier", 1.0)
    scale = getattr(inner.embed_tokens, "scalar_embed_scale", scale)
    yield "model.embedding_multiplier", scale, c.embedding_scale
    ropes = [c.rope] if c.local_rope is None else [c.rope, c.local_rope]
    names = [f"{kind}attention_scaling" for kind in ("", f"{FULL}_", f"{LOCAL}_")]
    scalings = [name for name in names if hasattr(inner.rotary_emb, name)]
    for name, rope in zip(scalings, ropes, strict=True):
        value = float(getattr(inner.rotary_emb, name))
        yield f"model.rotary_emb.{name}", value, rope.attention
    yield "model.norm.variance_epsilon", _epsilon(inner.norm), c.norm_eps
    for i, layer in enumerate(inner.layers):
        prefix = f"model.layers.{i}"
        scale = getattr(layer, "residual_multiplier", 1.0)
        yield f"{prefix}.residual_multiplier", scale, c.residual_scale
        norms = [*NORMS[c.norms].values()]
        heads = c.qk_norm and not is_delta(layer)
        norms += ["self_attn.q_norm", "self_attn.k_norm"] if heads else []
        for name in norms:
            value = _epsilon(layer.get_submodule(name))
            yield f"{prefix}.{name}.variance_epsilon", value, c.norm_eps
        yield f"{prefix}.linear_attn", is_delta(layer), c.delta is not None and c.delta.layers[i]
        if is_delta(layer):
            yield from _delta_net(f"{prefix}.linear_attn", layer.linear_attn, c)
        else:
            yield from _attention(f"{prefix}.self_attn", layer.self_attn, c, i)
        yield from _feed_forward(f"{prefix}.mlp", layer.mlp, c)


def _epsilon(norm: Any) -> float:
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


def _attention(prefix: str, module: Any, c: ModelConfig, i: int) -> Iterator[tuple[str, Any, Any]]:
    yield f"{prefix}.scaling", module.scaling, scale_of(c)
    yield f"{prefix}.head_dim", module.head_dim, c.head_dim
    yield f"{prefix}.num_key_value_groups", module.num_key_value_groups, c.heads // c.kv_heads
    yield f"{prefix}.is_causal", module.is_causal, True
    if hasattr(module, "sliding_window"):
        window = module.sliding_window
        window = window if window and window < c.context else None
        yield f"{prefix}.sliding_window", window, c.window if c.is_local(i) else None
    if c.softcap is not None:
        yield f"{prefix}.attn_logit_softcapping", module.attn_logit_softcapping, c.softcap
    rotated = c.rotated is None or c.rotated[i]
    yield f"{prefix}.use_rope", bool(getattr(module, "use_rope", True)), rotated


def _delta_net(prefix: str, module: Any, c: ModelConfig) -> Iterator[tuple[str, Any, Any]]:
    assert c.delta is not None
    size = c.delta.state
    sizes = module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim
    yield f"{prefix}'s sizes", sizes, (size.key_heads, size.heads, size.key_dim, size.value_dim)
    yield f"{prefix}.activation", module.activation, "silu"
    yield f"{prefix}.norm.variance_epsilon", module.norm.variance_epsilon, c.norm_eps
    conv, shape = c.delta.conv, tuple(module.conv1d.weight.shape)
    yield f"{prefix}.conv1d.weight", shape, (conv.channels, 1, conv.width)


def _feed_forward(prefix: str, module: Any, c: ModelConfig) -> Iterator[tuple[str, Any, Any]]:
    name = "activation_fn" if c.joined else "act_fn"
    if c.experts:
        gate = module.gate
        yield f"{prefix}.gate.top_k", gate.top_k, c.experts_per_token
        yield f"{prefix}.gate.norm_topk_prob", bool(gate.norm_topk_prob), c.experts_sum_to_one
        module, prefix = module.experts, f"{prefix}.experts"
    # transformers has a SiLU of its own, whose class is torch's or a subclass by version
    act = getattr(module, name)
    silu = isinstance(act, nn.SiLU) or type(act).__name__ in ("SiLUActivation", "LigerSiLU")
    activation = "SiLU" if silu else type(act).__name__
    yield f"{prefix}.{name}", activation, "GELUTanh" if c.gelu else "SiLU"
