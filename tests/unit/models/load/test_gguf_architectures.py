"""Every fused family whose architecture transformers reads from GGUF files is read, as by it."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from helpers.models import checkpoints, gguf_files
from helpers.oracles.dense import some_tokens, their_logits
from helpers.targets import few
from transformers import AutoModelForCausalLM
from transformers.integrations import GGUF_CONFIG_MAPPING

from csd.models.fused.config import ModelConfig
from csd.models.fused.families import FAMILIES
from csd.models.load import gguf as gguf_model
from csd.models.load import load
from csd.models.load.gguf.architectures import ARCHITECTURES

pytest.importorskip("gguf")
TOKENS = some_tokens(200)
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    partial_rotary_factor=0.75,
    short_factor=[1.0, 1.25, 1.5, 1.75, 2.0, 2.5],
    long_factor=[2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
    original_max_position_embeddings=256,
    attention_factor=1.25,
)
# architecture, changes of the tiny model
CASES = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3moe": ("qwen3moe", {}),
    "phi3": ("phi3", {}),
    "phi3 window": ("phi3", dict(sliding_window=100)),
    "phi3 longrope": ("phi3", dict(rope_parameters=LONGROPE)),
    "gemma2": ("gemma2", dict(tied=True)),
    "gemma3": ("gemma3", dict(tied=True)),
    "gemma3 untied": ("gemma3", {}),
    "gemma3 of 27B": (
        "gemma3",
        dict(num_hidden_layers=62, hidden_size=32, head_dim=16, query_pre_attn_scalar=8),
    ),
    "gemma3 without a window": (
        "gemma3",
        dict(sliding_window=checkpoints.CONTEXT, layer_types=["full_attention"] * 7),
    ),
    "gemma2 of 27B": (
        "gemma2",
        dict(num_hidden_layers=46, hidden_size=32, head_dim=16, query_pre_attn_scalar=8, tied=True),
    ),
}


@cache
def module(name):
    architecture, changes = CASES[name]
    # as a file has it
    epsilon = float(torch.tensor(1e-6))
    model = gguf_files.build(architecture, rms_norm_eps=epsilon, **changes)
    if ARCHITECTURES[gguf_files.architecture(model)].shift:
        # so that 1 is added and subtracted without rounding
        for key, w in model.named_parameters():
            if key.endswith("norm.weight"):
                w.data = (w.data * 1024).round() / 1024
    return model


def drawn(path):
    """csd's module of a file, in float32."""
    return gguf_model.read(path, torch.float32)


def test_the_architectures_are_those_of_transformers_and_of_the_fused_decoder():
    renamed = {"gemma3": "gemma3_text"}
    theirs = {renamed.get(name, name) for name in GGUF_CONFIG_MAPPING}
    ours = {family for kind in ARCHITECTURES.values() for family in kind.families}
    assert ours == theirs & FAMILIES.keys()
    assert {CASES[name][0] for name in CASES} >= ARCHITECTURES.keys()


@few(6)
@pytest.mark.parametrize("name", CASES)
def test_tensors_and_logits_are_those_of_the_model(name, tmp_path):
    """A file has the tensors of the module that was written."""
    model = module(name)
    keys = {"gemma3.attention.sliding_window": 0} if name.endswith("without a window") else {}
    path = gguf_files.write(model, tmp_path / "tiny.gguf", keys=keys)
    read = drawn(path)
    want, got = model.state_dict(), read.state_dict()
    assert want.keys() == got.keys()
    for key, w in want.items():
        assert torch.equal(got[key], w), key
    for key, w in dict(model.named_buffers()).items():
        assert torch.equal(dict(read.named_buffers())[key], w), key
    # with the same windows, caps, scales and experts, in the module and in the fused decoder
    assert torch.equal(their_logits(read.eval(), TOKENS), their_logits(model, TOKENS))
    config, of_the_file = map(ModelConfig.from_transformers, (model.config, read.config))
    assert of_the_file == replace(config, family=of_the_file.family)
    decoder = load(path, dtype=torch.float32).decoder
    assert decoder.name == "fused" and decoder.config == of_the_file


@pytest.mark.parametrize("name", [*ARCHITECTURES])
def test_tensors_are_those_that_transformers_loads(name, tmp_path):
    model = module(name)
    # transformers takes the embedding's padding from the file, and other defaults for some sizes
    path = gguf_files.write(
        model, tmp_path / "tiny.gguf", keys={"tokenizer.ggml.padding_token_id": 0}
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", config=model.config, dtype=torch.float32
    )
    want, got = theirs.state_dict(), drawn(path).state_dict()
    assert want.keys() == got.keys()
    for key, w in want.items():
        assert torch.equal(got[key], w), key


# keys that a file may leave out: the value of llama.cpp
DEFAULTS = {
    "gemma2.attention.sliding_window": ("sliding_window", 4096),
    "gemma2.attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
    "gemma2.final_logit_softcapping": ("final_logit_softcapping", 30.0),
    "qwen3moe.expert_feed_forward_length": ("moe_intermediate_size", 36),
}


@pytest.mark.parametrize("key", DEFAULTS)
def test_a_key_that_is_left_out_has_a_value(key):
    name = key.partition(".")[0]
    model = module(name)
    keys = {"general.architecture": name} | gguf_files.model_keys(model)
    field, value = DEFAULTS[key]
    fields = gguf_model.config_fields(keys, checkpoints.VOCAB)
    assert fields[field] == getattr(model.config, field) != value
    del keys[key]
    assert gguf_model.config_fields(keys, checkpoints.VOCAB)[field] == value


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("gemma2", "attention.sliding_window", 0),
        ("gemma2", "attention.sliding_window_pattern", 3),
        ("gemma2", "attention.scale", 0.5),
        ("gemma2", "final_logit_softcapping", [30.0]),
        ("gemma3", "attention.sliding_window", [1, 2]),
        ("gemma3", "attention.sliding_window_pattern", 0),
        ("gemma3", "attention.sliding_window_pattern", [True, False]),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("gemma3", "final_logit_softcapping", -1.0),
        ("gemma3", "rope.freq_base_swa", "10000"),
        ("gemma3", "rope.scaling.type", "yarn"),
        ("gemma3", "rope.scaling.factor", float("nan")),
        ("qwen3moe", "expert_gating_func", 2),
        ("qwen3moe", "expert_weights_norm", False),
        ("qwen3moe", "expert_weights_scale", 2.5),
        ("qwen3moe", "expert_shared_count", 1),
        ("qwen3moe", "expert_used_count", 0),
        ("phi3", "rope.dimension_count", 18),
        ("phi3", "rope.dimension_count", "12"),
        ("phi3", "attention.sliding_window", "2047"),
        ("phi3", "rope.scaling.attn_factor", 1.5),
        ("phi3", "rope.scaling.type", "longrope"),
    ],
    ids=str,
)
def test_refuse_a_value_that_the_decoder_does_not_compute(tmp_path, architecture, key, value):
    name = f"{architecture}.{key}"
    path = gguf_files.write(module(architecture), tmp_path / "tiny.gguf", keys={name: value})
    with pytest.raises(ValueError, match=f"tiny.gguf.* cannot be loaded: .*its .*{name}"):
        load(path)


@pytest.mark.parametrize("size", ["short", "long"])
def test_refuse_half_of_longropes_factors(tmp_path, size):
    path = gguf_files.write(
        module("phi3 longrope"), tmp_path / "tiny.gguf", drop=[f"rope_factors_{size}.weight"]
    )
    with pytest.raises(ValueError, match="it has one of the tensors rope_factors_short"):
        load(path)
