"""Modules that are not fused: changed behind their config, or with a property that csd lacks."""

import pytest
import torch
from helpers.models.families import build

from csd.models.load import load

# a value that a module computes with, changed behind its config
CHANGED = {
    "rope": ("smollm3", lambda m: setattr(m.model.layers[1].self_attn, "use_rope", True)),
    "scaling": ("granite", lambda m: setattr(m.model.layers[0].self_attn, "scaling", 0.5)),
    "residual_multiplier": (
        "granite",
        lambda m: setattr(m.model.layers[2], "residual_multiplier", 0.9),
    ),
    "embedding_multiplier": ("granite", lambda m: setattr(m.model, "embedding_multiplier", 2.0)),
    "top_k": ("qwen3_moe", lambda m: setattr(m.model.layers[0].mlp.gate, "top_k", 1)),
    "norm_topk_prob": (
        "qwen3_moe",
        lambda m: setattr(m.model.layers[0].mlp.gate, "norm_topk_prob", False),
    ),
    "post_feedforward_layernorm": (
        "olmo2",
        lambda m: setattr(m.model.layers[0].post_feedforward_layernorm, "variance_epsilon", 1.0),
    ),
    "sliding_window": (
        "qwen2 window",
        lambda m: setattr(m.model.layers[2].self_attn, "sliding_window", 5),
    ),
    "attn_logit_softcapping": (
        "gemma2",
        lambda m: setattr(m.model.layers[0].self_attn, "attn_logit_softcapping", 1.0),
    ),
    "sliding_attention_attention_scaling": (
        "olmo3",
        lambda m: setattr(m.model.rotary_emb, "sliding_attention_attention_scaling", 2.0),
    ),
    "pre_feedforward_layernorm": (
        "gemma2",
        lambda m: setattr(m.model.layers[0].pre_feedforward_layernorm, "eps", 1.0),
    ),
    "mlp.act_fn": ("gemma2", lambda m: setattr(m.model.layers[0].mlp, "act_fn", torch.nn.SiLU())),
    "experts.act_fn": (
        "qwen3_moe",
        lambda m: setattr(m.model.layers[0].mlp.experts, "act_fn", torch.nn.ReLU()),
    ),
    "activation_fn": (
        "phi3",
        lambda m: setattr(m.model.layers[0].mlp, "activation_fn", torch.nn.ReLU()),
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_changed_module_is_not_fused(case):
    name, change = CHANGED[case]
    model = build(name)
    change(model)
    with pytest.raises((TypeError, ValueError), match=case):
        load(model)


# what a family may have that is left to its module
LEFT = {
    "gemma3_text": (dict(attn_logit_softcapping=5.0), "attn_logit_softcapping=5.0 is not supp"),
    "smollm3": (dict(attention_bias=True), "attention_bias=True is not supported"),
    "qwen3_moe": (dict(mlp_only_layers=[1]), "layers without experts"),
    "granite": (dict(mlp_bias=True), "mlp_bias=True is not supported"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_the_module_is_named(name):
    changes, message = LEFT[name]
    with pytest.raises(ValueError, match=message):
        load(build(name, **changes))
