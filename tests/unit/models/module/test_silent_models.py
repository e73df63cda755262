"""Models whose logits the decoder would get wrong are refused or followed, never misread."""

import copy

import pytest
import torch
from helpers.models.checkpoints import build, config, make
from helpers.oracles.dense import Dense, assert_near, some_tokens, their_logits
from torch import nn

from csd.models.fused.config import ModelConfig
from csd.models.fused.fuse import fuse, is_fused
from csd.models.load import load


def assert_followed(decoder, model) -> None:
    tokens = some_tokens(50)
    exact = their_logits(copy.deepcopy(model).double(), tokens)
    assert_near(decoder, Dense(decoder).logits(tokens), their_logits(model, tokens), exact)


@pytest.mark.parametrize("family", ["llama", "llama3", "qwen3"])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_rotary_frequencies_that_the_module_has_rounded(family, low):
    model = build(family).to(low).to(torch.float32)
    decoder = fuse(copy.deepcopy(model))
    assert_followed(decoder, model)


@pytest.mark.parametrize("place", ["lm_head", "model.layers.0.self_attn.o_proj"])
def test_a_bias_is_refused(place):
    model = build("qwen2")
    module = model.get_submodule(place)
    module.bias = nn.Parameter(torch.ones(module.out_features))
    with pytest.raises(TypeError, match=f"{place} has a bias"):
        fuse(model)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_head_of_another_kind_is_refused():
    model = build("llama")
    model.lm_head = Doubled(40, 97, bias=False)
    with pytest.raises(TypeError, match="lm_head is a Doubled"):
        fuse(model)


def test_another_layout_at_the_same_address_is_noticed():
    model = build("llama")
    decoder = fuse(model)
    weight = model.model.layers[0].self_attn.k_proj.weight
    weight.data = weight.data.as_strided(weight.shape, (1, weight.shape[0]))
    assert not is_fused(model, decoder)
    assert_followed(fuse(model), model)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_folder_without_a_tokenizer_has_none(family, tmp_path):
    assert load(make(family, tmp_path)).tokenizer is None


@pytest.mark.parametrize(
    "rope",
    [
        {"full_attention": dict(rope_type="yarn", rope_theta=1e6, factor=4.0)},
        {"rope_type": "default"},
    ],
    ids=["of each kind of layer", "without theta"],
)
def test_rope_parameters_that_are_not_understood(rope):
    made = config("qwen3")
    made.rope_parameters = rope
    with pytest.raises(ValueError, match="rope_type and rope_theta"):
        ModelConfig.from_transformers(made)


@pytest.mark.parametrize("name", ["final_logit_softcapping", "logits_scaling", "num_local_experts"])
def test_caps_multipliers_and_experts_are_refused(name):
    made = config("llama")
    setattr(made, name, 8.0)
    with pytest.raises(ValueError, match=f"{name}=8.0 is not supported"):
        ModelConfig.from_transformers(made)
