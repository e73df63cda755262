"""Families with layers that have a state: the tokens of an independent loop over the module."""

import os
from dataclasses import replace

import pytest
import torch
from helpers.models.families import MODULES, build
from helpers.oracles import oracle
from helpers.oracles.token_by_token import TokenByToken
from helpers.runs.hybrid_draws import TOKENS, drawn, prompt
from helpers.targets import few, slow

import csd
from csd.engine.resources.sizes import CacheSizes, Demand
from csd.kernels.ops import reference
from csd.kernels.states import SSM
from csd.models.module.admit import admit
from csd.models.module.decoder import ModuleDecoder
from csd.models.module.probe import NotAdmitted
from csd.state.recurrent import StateSize, StateSizes

HYBRIDS = [*MODULES][[*MODULES].index("qwen3_next") :]
# in each run; `make test-families` draws with all of them
FEW = "qwen3_5_text", "lfm2 conv", "nemotron_h"
EACH = HYBRIDS if os.environ.get("CSD_EXAMPLES") else FEW
# its tokens pass positions at which states are stored, and at 81 whole pieces of 64 are read
PROMPTS = {name: 30 for name in HYBRIDS} | {"qwen3_5_text": 84}
BUDGETS = [(0, 16), pytest.param((4, 48), marks=slow)]


@few(2)
@pytest.mark.parametrize("budgets", BUDGETS, ids=str)
@pytest.mark.parametrize("name", EACH)
def test_samples_are_those_of_the_recurrence_token_by_token(name, budgets):
    model, given = build(name), prompt(PROMPTS[name])
    alone = TokenByToken(model)
    want = [
        oracle.generate(alone, given, seed=4, sample=i, max_new_tokens=TOKENS, temperature=0.7)
        for i in range(4)
    ]
    engine = csd.Engine(model, decoder="module")
    for budget in budgets:
        out = drawn(engine, given, budget)
        assert out.tokens == [tokens for tokens, *_ in want]
        for sample, (_, logprobs, *_) in zip(out, want, strict=True):
            # transformers computes states in float32, whatever the dtype
            assert sample.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert budget < 16 or out.stats.nodes_accepted > 4


def test_tokens_depend_on_the_states_at_checkpoints():
    """The equality above means something: with states that are forgotten, tokens are others."""
    model, given = build("nemotron_h"), prompt(40)
    engine = csd.Engine(model, decoder="module")
    want = drawn(engine, given, 4).tokens
    step = engine.caches.step
    plain = step.ops.advance_state
    assert len(set(map(tuple, want))) == 4

    def forget(state, *others):
        plain(state, *others)
        state.mul_(0.9)

    engine.ops = replace(engine.ops, advance_state=forget)
    assert drawn(engine, given, 4).tokens != want


@slow
def test_prompts_slots_and_chunks_change_no_token():
    """Prompts of several lengths in turns on two slots, read in chunks of any size."""
    model = build("falcon_h1")
    prompts = [prompt(n) for n in (1, 34, 90)]
    wide = csd.Engine(model, decoder="module")
    want = [drawn(wide, p, 0, 3, 12).tokens for p in prompts]
    for options in (dict(max_slots=2), dict(prefill_chunk=24)):
        engine = csd.Engine(model, decoder="module", **options)
        assert [out.tokens for out in drawn(engine, prompts, 12, 3, 12)] == want
        assert engine.caches.step.cache.states.prompts == {}


def test_states_are_begun_anew_after_an_interrupt():
    model, given = build("lfm2 conv"), prompt(30)
    engine = csd.Engine(model, decoder="module")
    want = drawn(engine, given, 8).tokens
    drawing = engine.stream(given, num_samples=4, max_new_tokens=TOKENS, end_token_ids=[])
    next(drawing)
    drawing.close()
    assert drawn(engine, given, 8).tokens == want
    assert engine.caches.step.cache.states.prompts == {}


@slow
def test_float32_draws_the_same_in_loops_and_references():
    model, given = build("qwen3_5_text", torch.float32), prompt(84)
    reference, loops = (
        csd.Engine(model, decoder="module", kernels=kernels) for kernels in ("reference", None)
    )
    want = drawn(reference, given, 0)
    for budget in (0, 16):
        out = drawn(loops, given, budget)
        for sample, other in zip(out, want, strict=True):
            # a first other token is a tie
            same = next(
                (
                    i
                    for i, (a, b) in enumerate(zip(sample.tokens, other.tokens, strict=True))
                    if a != b
                ),
                TOKENS,
            )
            assert sample.logprobs[:same] == pytest.approx(other.logprobs[:same], abs=1e-3)
        assert sum(a == b for a, b in zip(out.tokens, want.tokens, strict=True)) >= 3


def test_memory_is_as_calculated():
    """Sizes of Qwen3-Next's layers, and of an engine's caches."""
    layer = StateSize(key_heads=16, heads=32, key_dim=128, value_dim=128)
    sizes = StateSizes((), (layer,) * 36)
    states, tails = 36 * 32 * 128 * 128 * 4, 36 * 32 * (16 * 128 + 32 * 129) * 4
    assert sizes.slot_bytes(torch.bfloat16) == states + tails
    assert 75e6 < states < 76e6 and tails < 29e6
    model = build("bamba", torch.float32)
    engine = csd.Engine(model, decoder="module", kernels="reference")
    drawn(engine, prompt(20), 4, tokens=2)
    cache, of_model = engine.caches.step.cache, engine.decoder.config.states
    slots, memory = cache.slot_pages.shape[0], cache.states.slots
    given = sum(x.nbytes for x in memory.of_slots()) - memory.base.nbytes
    assert given == slots * of_model.slot_bytes(torch.float32)
    rows = [x for part in memory.states for x, _ in part.tails()]
    rows += [part.node for part in memory.convs]
    count = cache.node_k.shape[1]
    assert sum(x.nbytes for x in rows) == count * of_model.row_bytes(torch.float32)
    less = CacheSizes(
        slots=slots, groups=1, slot_pages=1, prompt_pages=1, slot_held=1, prompt_held=1
    )
    with_states = Demand.of(engine.decoder.config, torch.float32, less, count)
    engine.decoder.config = replace(engine.decoder.config, states=None)
    without = Demand.of(engine.decoder.config, torch.float32, less, count)
    of_prompt = of_model.slot_bytes(torch.float32)
    assert with_states.total - without.total == given + of_prompt + sum(x.nbytes for x in rows)


def test_a_mixer_that_computes_otherwise_is_not_admitted():
    model = build("qwen3_5_text", torch.float32)
    mixer = model.model.layers[0].linear_attn
    # the core over rows that are rolled: what csd answers is not what the module would do
    plain = mixer.in_proj_qkv.forward
    mixer.in_proj_qkv.forward = lambda x: plain(x).roll(1, dims=1)
    with pytest.raises(NotAdmitted, match="samples would depend on each other"):
        admit(ModuleDecoder(model))


@pytest.mark.parametrize("lost", ["advance_state", "commit_tail", "decay"])
def test_what_is_lost_of_a_state_is_not_admitted(lost, monkeypatch):
    decoder = ModuleDecoder(model := build("bamba", torch.float32))
    assert admit(decoder).states < 1e-5
    decoder = ModuleDecoder(model)
    ops = reference()
    if lost == "decay":
        plain = SSM.inputs

        def lasting(self, ops, kind):
            return *plain(self, ops, kind)[:2], torch.ones_like(self.dt)

        monkeypatch.setattr(SSM, "inputs", lasting)
    else:
        made = replace(ops, **{lost: lambda *tensors: None})
        monkeypatch.setattr("csd.models.module.compare.reference", lambda: made)
    with pytest.raises(NotAdmitted, match=r"mamba.* computes another function than"):
        admit(decoder)


def test_a_mixer_that_is_left_out_is_an_error():
    model = build("lfm2 conv")
    engine = csd.Engine(model, decoder="module")
    engine.decoder.mixers.reverse()
    engine.decoder.mixers.append(engine.decoder.mixers[0])
    with pytest.raises(
        RuntimeError, match="calls of layers with a state, as in the module's test pass"
    ):
        drawn(engine, prompt(5), 0)


def test_the_module_is_as_before_beside_passes():
    model = build("qwen3_5_text")
    ids = torch.tensor([prompt(20)])
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
    csd.Engine(model, decoder="module")
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, want)
    out = model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert out.shape == (1, 23)


def test_what_is_not_served_is_refused_by_name():
    model = build("lfm2 conv", torch.float32)
    with pytest.raises(ValueError, match="exact needs csd's fused decoder"):
        csd.Engine(model, decoder="module", exact=True)
    # draft models are the fused decoder's families
    draft = csd.Engine(build("qwen3", torch.float32), drafter=csd.DraftModel(model))
    with pytest.raises(ValueError, match="'lfm2' is not supported"):
        drawn(draft, prompt(8), 4)
