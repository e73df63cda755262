"""Choice of the decoder, fused or the module itself: by default, as asked, and behind a hook."""

import warnings

import pytest
import torch
from helpers.models.families import build
from helpers.oracles import oracle
from helpers.runs.module_draws import PROMPT, drawn, plain
from torch import nn

import csd


def test_auto_takes_the_fused_decoder_where_it_can():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = csd.Engine(build("llama"))
    assert (engine.decoder.name, engine.decoder.why) == ("fused", None)
    assert drawn(engine, 0, temperature=0).stats.decoder == "fused"


def test_auto_takes_the_module_and_names_what_ruled_out_the_fused_one():
    with pytest.warns(UserWarning, match=r"'glm' is not supported.*decoder='module'") as seen:
        out = csd.generate(build("glm"), PROMPT, max_new_tokens=2, seed=0)
    assert len(seen) == 1
    assert out.stats.decoder == "module"
    assert "model type 'glm' is not supported" in out.stats.fused_ruled_out
    csd.release()


def test_a_decoder_that_is_asked_for_runs_or_raises():
    with pytest.raises(ValueError, match="'glm' is not supported"):
        csd.generate(build("glm"), PROMPT, max_new_tokens=2, decoder="fused")
    with pytest.raises(ValueError, match="decoder must be one of 'auto', 'fused', 'module'"):
        csd.generate(build("llama"), PROMPT, decoder="best")
    engine = csd.Engine(build("llama"))
    with pytest.raises(ValueError, match="decoder must be set when the Engine is made"):
        csd.generate(engine, PROMPT, decoder="module")
    with pytest.raises(ValueError, match="static must be False"):
        csd.Engine(build("dbrx"), decoder="module", static=True)
    with pytest.raises(ValueError, match="exact needs csd's fused decoder"):
        csd.Engine(build("llama", torch.float32), decoder="module", exact=True)


def test_a_checkpoint_of_another_family_is_drawn_by_its_module(tmp_path):
    model = build("stablelm", torch.float32)
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="'stablelm' is not supported"):
        out = csd.generate(
            tmp_path,
            PROMPT,
            max_new_tokens=4,
            temperature=0,
            dtype=torch.float32,
            end_token_ids=[],
        )
    want = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT)),
        max_new_tokens=4,
        do_sample=False,
        eos_token_id=None,
    )
    assert out.tokens == [want[0, len(PROMPT) :].tolist()]
    csd.release()


def test_a_hook_moves_a_kept_engine_to_the_module_and_back():
    model = build("llama")
    before = csd.generate(model, PROMPT, max_new_tokens=6, seed=1, temperature=0.7)
    double = model.model.layers[0].mlp.register_forward_hook(lambda _, __, out: 2 * out)
    with pytest.warns(UserWarning, match="has a forward hook"):
        hooked = csd.generate(model, PROMPT, max_new_tokens=6, seed=1, temperature=0.7)
    assert hooked.stats.decoder == "module"
    want = oracle.generate(model, PROMPT, seed=1, sample=0, max_new_tokens=6, temperature=0.7)
    assert hooked.tokens == [want[0]] != before.tokens
    double.remove()
    after = csd.generate(model, PROMPT, max_new_tokens=6, seed=1, temperature=0.7)
    assert (after.stats.decoder, after.tokens) == ("fused", before.tokens)
    csd.release()


@pytest.mark.parametrize("name", ["llama yarn", "llama linear"])
def test_the_fused_decoder_has_scaled_rotary_embeddings(name):
    model = build(name)
    engine = csd.Engine(model, decoder="fused")
    for budget in (0, 16):
        got = drawn(engine, budget, temperature=0.7).tokens
        assert got == [tokens for tokens, *_ in plain(model, temperature=0.7)]


def test_the_decoders_agree_in_float32():
    model = build("qwen3", torch.float32)
    fused, module = (csd.Engine(model, decoder=name) for name in ("fused", "module"))
    for budget in (0, 16):
        one, other = (drawn(engine, budget, temperature=0.7) for engine in (fused, module))
        assert one.tokens == other.tokens


class Int8(nn.Module):
    """A linear layer of 8-bit weights, with a scale a row."""

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.data
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), False)

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) * self.scale).T


def test_quantised_layers_of_the_users_own():
    model = build("llama")
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, Int8(getattr(layer.mlp, name)))
    with pytest.warns(UserWarning, match="is a Int8, not a plain Linear"):
        engine = csd.Engine(model)
    want = [tokens for tokens, *_ in plain(model, temperature=0.7)]
    assert drawn(engine, 0, temperature=0.7).tokens == want
    assert drawn(engine, 16, temperature=0.7).tokens == want
