"""Families of transformers by their own modules: the tokens of plain sampling, or a refusal."""

import os
import re
from dataclasses import replace

import pytest
import torch
from helpers.checks.host_reads import NoHostReads
from helpers.models.families import HEAD, MODULES, REFUSED, build, config
from helpers.runs.module_draws import PROMPT, drawn, plain
from helpers.targets import few
from torch import nn

import csd
from csd.models.module.admit import admit
from csd.models.module.decoder import ModuleDecoder, host_read_of
from csd.models.module.probe import NotAdmitted
from csd.state.kv_cache import KVCache

# in each run; `make test-long` draws with all of them
FEW = (
    "llama",
    "llama yarn",
    "gemma2",
    "gemma3n_text",
    "cohere2",
    "gpt2",
    "opt",
    "granite",
    "diffllama",
    "deepseek_v3",
    "gpt_oss",
    "llama4_text",
    "qwen3_moe",
    "phi3 window",
)
EACH = list(MODULES) if os.environ.get("CSD_EXAMPLES") else FEW


@few(4)
@pytest.mark.parametrize("name", EACH)
def test_a_module_draws_the_tokens_of_plain_sampling(name):
    model = build(name)
    engine = csd.Engine(model, decoder="module", prefill_chunk=8)
    assert (engine.decoder.name, engine.static, engine.exact) == ("module", False, False)
    for params in (dict(temperature=0.7, top_p=0.95), dict(temperature=0)):
        want = plain(model, **params)
        for budget in (0, 16):
            out = drawn(engine, budget, **params)
            assert out.tokens == [tokens for tokens, *_ in want]
            for sample, (_, logprobs, raw, _) in zip(out, want, strict=True):
                # some families compute parts of it in float32
                assert sample.logprobs == pytest.approx(logprobs, abs=2e-5)
                assert sample.raw_logprobs == pytest.approx(raw, abs=2e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_refuse_by_name(name):
    _, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=message):
        csd.Engine(build(name, torch.float32), decoder="module")


@pytest.mark.parametrize("name", ["jamba", "kimi_linear", "llama dynamic", "falcon", "bart"])
def test_refuse_by_config_before_weights_are_read(name, tmp_path):
    config(name).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match=REFUSED[name][1]):
        csd.Engine(tmp_path)


# a property of a call that is left out, or altered by one -> the family that has it
ALTERED = {
    "no window": ("mistral", 0, dict(window=None)),
    "a longer window": ("cohere2", 0, dict(window=10)),
    "a shorter window": ("gpt_oss", 2, dict(window=8)),
    "no chunk": ("llama4_text", 0, dict(chunk=None)),
    "a longer chunk": ("llama4_text", 0, dict(chunk=9)),
    "no cap": ("gemma2", 1, dict(softcap=None)),
    "another cap": ("gemma2", 1, dict(softcap=2.05)),
    "no sinks": ("gpt_oss", 1, dict(sinks=False)),
    "another scale": ("granite", 0, dict(scale=0.31)),
}


@pytest.mark.parametrize("case", ALTERED)
def test_a_call_with_another_property_is_not_admitted(case):
    name, at, change = ALTERED[case]
    model = build(name, torch.bfloat16 if "window" in case else torch.float32)
    assert admit(ModuleDecoder(model)).mixing < 1e-4
    decoder = ModuleDecoder(model)
    call = decoder.calls[at]
    call.spec = replace(call.spec, **change)
    with pytest.raises(NotAdmitted, match=rf"{call.place}.* computes another attention than"):
        admit(decoder)


@pytest.mark.parametrize("case", ["no window", "no chunk", "no cap", "no sinks"])
def test_tokens_depend_on_the_property(case, monkeypatch):
    """The equality above means something: without the property, the tokens are others."""
    name, _, change = ALTERED[case]
    model = build(name)
    engine = csd.Engine(model, decoder="module")
    for call in engine.decoder.calls:
        call.spec = replace(call.spec, **change)
    monkeypatch.setattr("csd.models.module.decoder.Pass._check", lambda *_: None)
    assert drawn(engine, 0, temperature=0.7).tokens != [
        tokens for tokens, *_ in plain(model, temperature=0.7)
    ]


class Mixes(nn.Module):
    """A layer in which a row reads its neighbour, as a convolution does."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        out = self.inner(x)
        return out + 0.1 * out.roll(1, dims=-2)


class ScaledByTensor(Mixes):
    def forward(self, x):
        step = x.abs().max() / 7
        return self.inner((x / step).round() * step)


@pytest.mark.parametrize("layer", [Mixes, ScaledByTensor])
def test_rows_that_depend_on_others_are_not_admitted(layer):
    model = build("llama", torch.float32)
    model.model.layers[1].mlp = layer(model.model.layers[1].mlp)
    with pytest.raises(NotAdmitted, match="samples would depend on each other"):
        csd.Engine(model)


def test_positions_that_are_not_those_given_are_not_admitted():
    model = build("llama", torch.float32)
    rotary = model.model.rotary_emb.forward

    def counted(x, position_ids):
        return rotary(x, torch.arange(position_ids.shape[1])[None])

    model.model.rotary_emb.forward = counted
    with pytest.raises(NotAdmitted, match="does not take positions from position_ids"):
        csd.Engine(model)


# families whose own code reads the host in a pass, and where
READS = {
    "jetmoe": "JetMoe.* reads a tensor on the host",
    "dbrx": "DbrxExperts.forward reads a tensor on the host",
}
STATIC = list(MODULES) if os.environ.get("CSD_EXAMPLES") else [*FEW, *READS, "qwen3", "stablelm"]


@few(4)
@pytest.mark.parametrize("name", STATIC)
def test_a_pass_reads_the_host_or_its_steps_are_not_static(name):
    """On meta tensors, which have no values; where nothing reads any, with reads rejected too."""
    # grouped products of experts take bfloat16
    model = build(name, torch.bfloat16)
    names = [getattr(c, "_experts_implementation", None) for c in (model.config,)]
    decoder = ModuleDecoder(model)
    why = decoder.why_not_static
    found = host_read_of(decoder.base, decoder.parts)
    assert [getattr(c, "_experts_implementation", None) for c in (model.config,)] == names
    assert re.match(READS[name], found) if name in READS else found is None
    if why is not None:
        assert why == found
        with pytest.raises(ValueError, match="static must be False for this module"):
            csd.Engine(model, decoder="module", static=True)
        return
    decoder.capture(True)
    with NoHostReads() as seen:
        rows(decoder)
    assert any("mm" in operation for operation in seen.seen)


def rows(decoder, count=7):
    """A pass whose attention gives zeros, of the values' size."""
    cache = KVCache(
        decoder.config,
        slots=1,
        pages=2,
        prompt_pages=1,
        slot_pages=1,
        rows=count,
        dtype=decoder.dtype,
        device="cpu",
    )
    sizes = {call.layer: call.spec.value_dim for call in decoder.calls}

    def attend(layer, q, *_, **named):
        return q.new_zeros(*q.shape[:2], sizes[layer])

    ids = torch.arange(count, dtype=torch.int32)
    return decoder.forward(ids, ids, attend, *cache.nodes(count))


@pytest.mark.parametrize("name", ["granite", "gpt2", "stablelm"])
def test_static_steps_of_a_module_draw_the_same_tokens(name):
    model = build(name)
    engine = csd.Engine(model, decoder="module", static=True)
    assert engine.static
    want = [tokens for tokens, *_ in plain(model, temperature=0.7)]
    assert drawn(engine, 0, temperature=0.7).tokens == want
    assert drawn(engine, 16, temperature=0.7).tokens == want


def test_experts_in_float64_have_no_grouped_product_and_are_not_static():
    with pytest.raises(ValueError, match="static must be False for this module"):
        csd.Engine(build("qwen2_moe"), decoder="module", static=True)


def test_tensors_that_were_moved_make_a_recorded_module_anew():
    model = build("granite")
    engine = csd.Engine(model, decoder="module", static=True)
    first = engine.decoder
    drawn(engine, 0, temperature=0)
    assert engine.decoder is first
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    drawn(engine, 0, temperature=0)
    assert engine.decoder is not first and engine.decoder.captured


def test_layers_of_two_sizes_have_a_memory_each():
    engine = csd.Engine(build("gemma4_text", **HEAD), decoder="module")
    config = engine.decoder.config
    assert config.shapes == ((2, 8, 8), (2, 16, 16))
    engine.generate(PROMPT, max_new_tokens=1)
    cache = engine.caches.step.cache
    assert [tuple(x.shape[-2:]) for x in cache.k] == [(2, 8), (2, 16)]
    taken = sum(x.numel() for part in cache.parts for x in part[:2]) * engine.dtype.itemsize
    # and what `memory=` counts
    assert taken == cache.pages * cache.bytes_per_page(config, engine.dtype)
