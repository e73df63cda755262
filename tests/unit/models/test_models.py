"""The decoder's logits against those of transformers, and random models of known shapes."""

import pytest
import torch
import transformers
from helpers.models import checkpoints
from helpers.oracles.dense import OPS, Dense, assert_same_logits, some_tokens, their_logits
from helpers.targets import few

import csd
from bench.lib.shapes import SHAPES, random_model
from csd.kernels.layers.rms_norm import rms_norm_ref
from csd.models.fused.config import ModelConfig
from csd.models.fused.decoder import Decoder
from csd.models.load import load

pytestmark = pytest.mark.quick

WRITTEN = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
FAMILY = pytest.mark.parametrize("family", checkpoints.FAMILIES)


def transformers_model(path, dtype=torch.float32, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)


@few(6)
@WRITTEN
@FAMILY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_logits(checkpoint, family, tied, dtype):
    path = checkpoint(family, tied=tied)
    model = transformers_model(path, dtype)
    tokens = some_tokens(50)
    want = their_logits(model, tokens)
    assert want.std() > 1
    exact = their_logits(transformers_model(path, torch.float64), tokens)
    exact = None if dtype == torch.float64 else exact
    loaded = load(path, dtype=dtype)
    assert loaded.dtype == dtype and loaded.config.tied == tied
    assert_same_logits(loaded.decoder, tokens, want, 37, exact)
    # the same from the module itself, whose own logits stay as they are
    assert_same_logits(load(model).decoder, tokens, want, 37, exact)
    assert torch.equal(their_logits(model, tokens), want)


@FAMILY
def test_logits_in_bfloat16(checkpoint, family):
    """No further from the exact logits than transformers is in the same dtype."""
    path = checkpoint(family, dtype=torch.bfloat16)
    tokens = some_tokens(40)
    exact = their_logits(transformers_model(path, torch.float64), tokens)
    theirs = their_logits(transformers_model(path, torch.bfloat16), tokens)
    ours = Dense(load(path, dtype=torch.bfloat16).decoder).logits(tokens)
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).square().mean() < 1.5 * (theirs - exact).square().mean()


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_rows_at_any_position(checkpoint, family):
    """Rows need not follow one another, and a row of padding changes no other row."""
    decoder = load(checkpoint(family), dtype=torch.float64).decoder
    c = decoder.config
    tokens, order = some_tokens(12), torch.randperm(12)
    seen = Dense(decoder)
    want = seen.logits(tokens)
    node_k, node_v = torch.zeros_like(seen.kv).new_zeros(2, c.layers, 14, c.kv_heads, c.head_dim)
    token = torch.cat([tokens[order], torch.tensor([-1, -1])]).int()
    position = torch.cat([order, torch.tensor([0, 0])]).int()

    def attend(layer, q):
        k, v = (x[layer].repeat_interleave(c.heads // c.kv_heads, 1) for x in (node_k, node_v))
        score = torch.einsum("rhd,chd->hrc", q, k) * c.head_dim**-0.5
        later = (position > position[:, None]) | (token == -1)
        return torch.einsum("hrc,chd->rhd", score.masked_fill(later, float("-inf")).softmax(-1), v)

    got = decoder.logits(decoder.forward(token, position, attend, node_k, node_v, OPS))
    assert got.shape == (14, c.vocab)
    assert (got[:12] - want[order]).abs().max() < 1e-12
    # keys and values are those of the sequence in order, at every layer
    assert (node_k[:, :12] - seen.kv[0][:, order]).abs().max() < 1e-12
    assert (node_v[:, :12] - seen.kv[1][:, order]).abs().max() < 1e-12


@FAMILY
def test_frequencies_of_a_config(family):
    """A decoder without a module computes the tables that it would have taken from one."""
    theirs = load(checkpoints.build(family)).decoder
    ours = Decoder(theirs.config, theirs.embedding, theirs.layers, theirs.norm, theirs.head)
    assert torch.equal(ours.cos, theirs.cos) and torch.equal(ours.sin, theirs.sin)
    assert theirs.cos.shape == (checkpoints.CONTEXT, theirs.config.head_dim)


def test_config_sizes():
    config = ModelConfig.from_transformers(checkpoints.config("llama3"))
    assert config.rope_scaling == (8.0, 1.0, 4.0, 128) and config.rope_theta == 10000.0
    assert (config.heads, config.kv_heads, config.head_dim) == (4, 1, 8)
    assert not config.qkv_bias and not config.qk_norm
    # what a config leaves out
    plain = checkpoints.config("qwen2", num_attention_heads=6, num_key_value_heads=2)
    assert ModelConfig.from_transformers(plain).head_dim == 8
    plain = checkpoints.config("llama", num_key_value_heads=None, head_dim=None)
    config = ModelConfig.from_transformers(plain)
    assert (config.kv_heads, config.head_dim) == (4, 10)


@pytest.mark.parametrize("std", [0.5, 6.0])
def test_random_model(std):
    decoder = random_model("tiny", dtype=torch.float64, logit_std=std)
    c = decoder.config
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, c.hidden, generator=generator, dtype=torch.float64)
    hidden = rms_norm_ref(x, decoder.norm, c.norm_eps)[0]
    assert decoder.logits(hidden).std().item() == pytest.approx(std, rel=0.05)
    tokens = some_tokens(60, c.vocab)
    logits = Dense(decoder).logits(tokens)
    assert logits.std().item() == pytest.approx(std, rel=0.1)
    # what comes out depends on the prefix, and not on the last token alone
    other = tokens.clone()
    other[:-1] = other[:-1].flip(0)
    assert (Dense(decoder).logits(other)[-1] - logits[-1]).std() > 0.2 * std


def test_random_model_is_the_same_for_a_seed():
    first, again, other = (random_model("tiny", seed=s) for s in (0, 0, 1))
    assert first.head.dtype == torch.bfloat16
    assert torch.equal(first.head, again.head) and torch.equal(first.embedding, again.embedding)
    assert not torch.equal(first.head, other.head)


def test_random_model_runs_in_the_engine():
    with csd.Engine(random_model(SHAPES["tiny"], dtype=torch.float32)) as engine:
        result = engine.generate([5, 6, 7], num_samples=2, max_new_tokens=4, seed=0)
    assert [len(s.tokens) for s in result] == [4, 4]


def test_random_model_refuses_an_unknown_name():
    with pytest.raises(ValueError, match=r"name must be one of 'llama-3\.1-8b', .*, got 'gpt-2'"):
        random_model("gpt-2")


SIZES = {"llama-3.1-8b": 8030261248, "qwen2.5-7b": 7615616512, "smollm2-135m": 134515008}


@pytest.mark.parametrize("name", SIZES)
def test_shapes_have_the_size_of_their_models(name):
    c = SHAPES[name]
    attention = c.hidden * c.head_dim * 2 * (c.heads + c.kv_heads)
    bias = c.head_dim * (c.heads + 2 * c.kv_heads) * c.qkv_bias
    layer = attention + bias + 3 * c.hidden * c.intermediate + 2 * c.hidden
    head = c.vocab * c.hidden * (1 if c.tied else 2)
    assert head + c.layers * layer + c.hidden == SIZES[name]
