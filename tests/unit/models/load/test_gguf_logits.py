"""Logits of GGUF files: those of the equivalent transformers model, and llama.cpp's of the file."""

import copy
import importlib.util
from functools import cache

import pytest
import torch
from helpers.models import checkpoints, gguf_files
from helpers.oracles.dense import Dense, assert_near, some_tokens, their_logits
from helpers.targets import few
from llama_cpp_model import LlamaCppModel

from csd.models.load import load

LLAMA3 = checkpoints.FAMILIES["llama3"]["rope_parameters"]
FACTORS = {"rope_freqs.weight": gguf_files.rope_factors(LLAMA3, 8)}
OTHER = {"rope_freqs.weight": torch.linspace(1, 9, 8)}
TOKENS = some_tokens(200)
VOCABULARY = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [f"word{i}" for i in range(checkpoints.VOCAB)],
    "tokenizer.ggml.scores": [0.0] * checkpoints.VOCAB,
}


def linear(factor):
    return dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=factor))


def plain(theta):
    return dict(rope_parameters=dict(rope_type="default", rope_theta=theta))


# family, changes of the module's config, changes of its file
CASES = {
    "llama": ("llama", {}, {}),
    "mistral": ("mistral", {}, {}),
    "mistral by name": ("mistral", {}, dict(keys={"general.name": "mistral"})),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "tied": ("qwen3", dict(tied=True), {}),
    "llama 3.1": ("llama3", {}, dict(tensors=FACTORS)),
    "llama 3.2": ("llama3", dict(tied=True), dict(tensors=FACTORS)),
    "other factors": ("llama", {}, dict(tensors=OTHER)),
    "factors and linear": (
        "llama",
        linear(2.0),
        dict(tensors=OTHER, keys={"llama.rope.scaling.factor": 2.0}),
    ),
    "linear": (
        "llama",
        linear(4.0),
        dict(keys={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}),
    ),
    "linear of qwen": ("qwen3", linear(2.5), dict(keys={"qwen3.rope.scaling.factor": 2.5})),
    "linear by its old name": ("llama", linear(4.0), dict(keys={"llama.rope.scale_linear": 4.0})),
    "not scaled": (
        "qwen2",
        {},
        dict(keys={"qwen2.rope.scaling.type": "none", "qwen2.rope.scaling.factor": 4.0}),
    ),
    "theta": ("llama", plain(123456.0), {}),
    "no theta": ("qwen2", plain(10000.0), dict(drop=["qwen2.rope.freq_base"])),
    "epsilon": ("qwen3", dict(rms_norm_eps=0.25), {}),
    "no kv heads": (
        "llama",
        dict(num_key_value_heads=4),
        dict(drop=["llama.attention.head_count_kv"]),
    ),
    "no sizes of heads": (
        "llama",
        dict(head_dim=12),
        dict(
            drop=[
                f"llama.{k}"
                for k in ("attention.key_length", "attention.value_length", "rope.dimension_count")
            ]
        ),
    ),
    "no vocabulary size": ("qwen2", {}, dict(drop=["qwen2.vocab_size"], keys=VOCABULARY)),
    "keys that change nothing": (
        "llama",
        {},
        dict(
            keys={
                "general.type": "model",
                "general.license": "apache-2.0",
                "general.file_type": 0,
                "quantize.imatrix.entries_count": 3,
                "llama.expert_count": 0,
                "llama.expert_used_count": 0,
                "llama.logit_scale": 1.0,
                "llama.attention.sliding_window": 512,
                "llama.attention.causal": True,
                "llama.attention.layer_norm_epsilon": 1e-5,
                "llama.attention.scale": 0.25,
                "llama.final_logit_softcapping": 0.0,
                "llama.residual_scale": 0.0,
                "llama.rope.scaling.attn_factor": 1.0,
                "llama.rope.scaling.finetuned": True,
                "llama.rope.scaling.original_context_length": 64,
                "llama.pooling_type": 0,
                "llama.tensor_data_layout": "Meta AI original pth",
            }
        ),
    ),
}


@cache
def module(name):
    family, changes, file = CASES[name]
    if family == "llama":
        # as wide as its heads together, which llama.cpp takes for granted without sizes of heads
        changes = dict(hidden_size=48) | changes
    epsilon = float(torch.tensor(changes.get("rms_norm_eps", 1e-6), dtype=torch.float32))
    model = checkpoints.build(family, **changes | dict(rms_norm_eps=epsilon))
    if file.get("tensors") is OTHER:
        # no config has these
        model.model.rotary_emb.inv_freq /= OTHER["rope_freqs.weight"]
    return model


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    model = module(request.param)
    return model, gguf_files.write(model, tmp_path / "tiny.gguf", **CASES[request.param][2])


@few(5)
def test_logits_are_those_of_the_equivalent_module(case):
    model, path = case
    decoder = load(path, dtype=torch.float32).decoder
    want = their_logits(model, TOKENS)
    exact = their_logits(copy.deepcopy(model).double(), TOKENS)
    assert_near(decoder, Dense(decoder).logits(TOKENS), want, exact)


def test_each_case_differs_from_the_same_file_without_it(tmp_path):
    """Else a dropped key would pass."""
    for name in ("llama 3.1", "other factors", "linear", "linear of qwen", "theta", "epsilon"):
        model = module(name)
        arch = gguf_files.architecture(model)
        path = gguf_files.write(
            model,
            tmp_path / "plain.gguf",
            keys={
                f"{arch}.rope.freq_base": 10000.0,
                f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
            },
        )
        decoder = load(path, dtype=torch.float32).decoder
        want = their_logits(model, TOKENS)
        assert (Dense(decoder).logits(TOKENS) - want).abs().max() > 0.1, name


@pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)
def test_logits_are_llama_cpps(case):
    _, path = case
    decoder = load(path, dtype=torch.float32).decoder
    theirs = LlamaCppModel(path).logits(TOKENS)
    ours = Dense(decoder).logits(TOKENS)
    # both round to float32, in orders of their own
    assert (theirs - ours).abs().max() < 1e-4 * ours.abs().max()
    assert torch.equal(theirs.argmax(-1), ours.argmax(-1))
