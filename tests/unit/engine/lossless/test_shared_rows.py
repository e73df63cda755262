"""Samples with equal text share rows of the model, which changes nothing that they consist of.

The models' distributions are sharp, so samples part at all depths.
"""

import random
from functools import cache
from importlib.util import find_spec

import pytest
import torch
from helpers.models import checkpoints, families
from helpers.oracles.grammar_oracle import Pieces
from helpers.runs.engine_cases import assert_same_samples
from helpers.runs.exact_runs import assert_same_bits, run
from helpers.targets import few, values

import csd
from csd.engine.resources.held_bytes import held_bytes
from csd.engine.step.budget import StepTimeTable
from csd.models.load import load

# by name: family, decoder, dtype, whether the engine is exact
MODELS = {
    "float64": ("llama", "fused", torch.float64, None),
    "windows": ("qwen2 window", "fused", torch.float64, None),
    "hybrid": ("qwen3_5_text", "fused", torch.float64, None),
    "module": ("gemma2", "module", torch.float64, None),
    "module with states": ("bamba", "module", torch.float64, None),
    "bfloat16": ("llama", "fused", torch.bfloat16, True),
    "float32": ("qwen3", "fused", torch.float32, True),
}
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [(7 * i + 3) % 61 for i in range(70)]]


def sharp(model, scale=6.0):
    with torch.no_grad():
        model.get_output_embeddings().weight *= scale
    model.generation_config.eos_token_id = None
    return model


@cache
def model_of(name):
    family, decoder, dtype, exact = MODELS[name]
    return dict(model=sharp(families.build(family, dtype)), decoder=decoder, exact=exact)


def after_even(ids, logits):
    return logits.masked_fill((ids[:, -1:] % 2 == 0) & (torch.arange(61) % 3 == 0), -torch.inf)


FILTERS = [
    {},
    {},
    dict(top_p=0.9),
    dict(top_k=3, repetition_penalty=1.1),
    dict(min_p=0.05, min_new_tokens=4, stop_token_ids=[7, 9]),
    dict(typical_p=0.8, stop_token_ids=[5]),
]
RULES = [
    {},
    {},
    {},
    dict(logit_bias={7: 2.0, 8: float("-inf")}),
    dict(no_repeat_ngram_size=3, presence_penalty=0.5),
    dict(bad_words=[[5, 6], [3]], frequency_penalty=0.2),
    dict(logits_processor=after_even),
]


def random_call(rng):
    count = rng.choice([2, 5, 9])
    options = dict(
        num_samples=count,
        max_new_tokens=rng.choice([4, 9, 14]),
        temperature=rng.choice([0, 0.3, 0.7, 1.0]),
        seed=rng.randrange(100),
        first_sample=rng.choice([0, 0, 3]),
        budget=rng.choice([0, 3, 17, 40, "auto"]),
        speculate=rng.random() < 0.85,
        top_logprobs=rng.choice([0, 0, 2]),
        drafter=rng.choice(["consensus", "consensus", "paper", "prompt-lookup"]),
    )
    options |= rng.choice(FILTERS) | rng.choice(RULES)
    if rng.random() < 0.2:
        options["until"] = lambda done: len(done) >= 2
    return options


@few(4)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", MODELS)
def test_a_sample_is_the_same_with_shared_rows_and_without(name, seed):
    rng = random.Random(f"{name} {seed}")
    options, loaded = random_call(rng), model_of(name)
    slots = dict(max_slots=rng.choice([1, 3, 7, 16]), lag=rng.choice([None, 0, 2]))
    until = options.pop("until", None)
    prompts = rng.choice([PROMPTS, PROMPTS, [*PROMPTS, PROMPTS[0]]])
    outs, held = {}, {}
    for share in (True, False):
        engine = csd.Engine(**loaded, **slots, share_rows=share)
        # measured, it would take longer than all else here
        engine.step_times.table = StepTimeTable([1, 64], [1.0, 2.0])
        outs[share] = engine.generate(prompts, until=until, **options)
        step = engine.caches.step
        held[share] = held_bytes([step.cache, step.slots])
    assert held[True] == held[False] > 0
    for got, want in zip(outs[True], outs[False], strict=True):
        assert got.stats.tokens == want.stats.tokens or until
        for mine, other in zip(got, want, strict=True):
            # which tokens a cancelled sample has depends on its steps
            n = min(len(mine.tokens), len(other.tokens)) if until else len(other.tokens)
            assert mine.tokens[:n] == other.tokens[:n]
            if not until:
                assert mine.finish_reason == other.finish_reason
            for x, y in ((mine.logprobs, other.logprobs), (mine.raw_logprobs, other.raw_logprobs)):
                if loaded["exact"]:
                    assert x[:n] == y[:n]
                assert x[:n] == pytest.approx(y[:n], abs=1e-9 if not loaded["exact"] else 0)


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_hidden_states_and_logits_have_the_same_bits(name):
    options = dict(seed=3, max_new_tokens=50, temperature=0.5, ignore_eos=True, budget=9)
    runs = [
        run(csd.Engine(**model_of(name), share_rows=share), PROMPTS, count, **options)
        for share, count in ((True, 9), (False, 12))
    ]
    stats = runs[0][0][0].stats
    assert stats.rows < stats.sample_steps + stats.nodes_proposed
    assert_same_bits(*runs)


@values
@pytest.mark.parametrize("name", ["float64", "hybrid", "module"])
@pytest.mark.parametrize("speculate", [True, False])
def test_rows_are_the_distinct_texts(name, speculate):
    """Greedy samples are one text; without drafts, rows are the distinct beginnings."""
    engine = csd.Engine(**model_of(name))
    out = engine.generate(
        PROMPTS[0], num_samples=6, temperature=0, max_new_tokens=12, speculate=speculate, budget=0
    )
    assert out.stats.rows == 12 and out.stats.tokens == 72
    out = engine.generate(
        PROMPTS[0], num_samples=12, temperature=0.6, max_new_tokens=12, speculate=False
    )
    texts = {tuple(s.tokens[:n]) for s in out for n in range(len(s.tokens))}
    assert out.stats.rows == len(texts) < out.stats.tokens


def test_samples_join_only_while_their_texts_are_equal():
    """Samples that take a slot later share rows with each other, not with those before."""
    engine = csd.Engine(**model_of("float64"), max_slots=4, together=4)
    wide = csd.Engine(**model_of("float64"), max_slots=64, share_rows=False)
    options = dict(num_samples=23, temperature=0.6, max_new_tokens=9, seed=2)
    options |= dict(stop_token_ids=[7, 9, 11], budget=6)
    outs = [e.generate(PROMPTS, **options) for e in (engine, wide)]
    assert [[s.tokens for s in out] for out in outs[0]] == [
        [s.tokens for s in out] for out in outs[1]
    ]
    assert sum(out.stats.rows for out in outs[0]) < sum(out.stats.rows for out in outs[1])


@pytest.mark.parametrize("name", ["float64", "hybrid", "module", "bfloat16"])
def test_equal_prompts_of_a_call_share_rows(name):
    """They are groups of their own, each with its graph and pages."""
    options = dict(num_samples=3, temperature=0.6, max_new_tokens=12, seed=5)
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[0]]
    shared, own = (
        csd.Engine(**model_of(name), max_slots=16, share_rows=share) for share in (True, False)
    )
    outs = [engine.generate(prompts, budget=9, **options) for engine in (shared, own)]
    assert_same_samples(*outs)
    assert sum(out.stats.rows for out in outs[0]) < sum(out.stats.rows for out in outs[1])
    # without drafts, rows are the distinct beginnings of all samples of equal prompts
    plain = shared.generate(prompts, speculate=False, **options)
    assert_same_samples(plain, outs[1])
    samples = [s.tokens for i in (0, 2, 3) for s in plain[i]]
    texts = {tuple(tokens[:n]) for tokens in samples for n in range(len(tokens))}
    assert sum(plain[i].stats.rows for i in (0, 2, 3)) == len(texts)


@values
@pytest.mark.parametrize("name", ["float64", "hybrid", "bfloat16"])
@pytest.mark.parametrize("speculate", [True, False])
def test_forks_of_a_session_share_rows(name, speculate):
    options = dict(temperature=0.6, speculate=speculate, max_new_tokens=8, budget=6)
    runs, rows = [], []
    for share in (True, False):
        session = csd.Engine(**model_of(name), share_rows=share).session(
            PROMPTS[0], num_samples=2, seed=3
        )
        session.sample(**options)
        session[1].fork(num_samples=5)
        session.sample(**options)
        runs.append([(branch.tokens, branch.logprobs) for branch in session])
        rows.append(session.rows)
    for mine, other in zip(*runs, strict=True):
        assert mine[0] == other[0]
        assert mine[1] == pytest.approx(other[1], abs=0 if model_of(name)["exact"] else 1e-9)
    assert rows[0] < rows[1]


@pytest.mark.skipif(not find_spec("llguidance"), reason="needs the extra [grammar]")
@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_with_a_grammar(temperature, speculate):
    loaded = load(sharp(checkpoints.build("llama", dtype=torch.float64)), tokenizer=Pieces())
    options = dict(
        num_samples=7,
        temperature=temperature,
        max_new_tokens=14,
        regex="(abc|abd|b.)+(true|false)",
        speculate=speculate,
    )
    outs = [
        csd.Engine(loaded, share_rows=share).generate(PROMPTS[0], budget=12, **options)
        for share in (True, False)
    ]
    assert [s.tokens for s in outs[0]] == [s.tokens for s in outs[1]]
    assert [s.raw_logprobs for s in outs[0]] == [
        pytest.approx(s.raw_logprobs, abs=1e-9) for s in outs[1]
    ]
    assert outs[0].stats.rows < outs[1].stats.rows


def test_other_verifiers_do_not_share():
    engine = csd.Engine(**model_of("float64"))
    options = dict(num_samples=4, temperature=0.3, max_new_tokens=6, budget=4)
    out = engine.generate(PROMPTS[0], verifier="canonical", **options)
    assert out.stats.rows == out.stats.sample_steps + out.stats.nodes_proposed


@values
@pytest.mark.parametrize("name", ["float64", "hybrid", "module", "bfloat16"])
@pytest.mark.parametrize(
    "options", [{}, dict(temperature=0.7, top_p=0.9, top_logprobs=2, entropy=True)], ids=str
)
def test_given_texts_share_rows(name, options):
    rng = random.Random(name)
    begin = [[rng.randrange(61) for _ in range(n)] for n in (3, 9, 20)]
    given = [
        rng.choice(begin)[: rng.randrange(1, 21)] + [rng.randrange(61) for _ in range(more)]
        for more in (0, 1, 4, 11, 17, 25, 40)
    ]
    given += [given[-1], given[-1][:30], begin[2]]
    both = {}
    for share in (True, False):
        engine = csd.Engine(**model_of(name), max_slots=16, share_rows=share)
        both[share] = csd.score(engine, PROMPTS[0], given, **options)
    assert both[True].tokens == both[False].tokens == given
    # given tokens are no drafts
    assert all("nothing was drafted" in str(out.stats) for out in both.values())
    close = 0 if model_of(name)["exact"] else 1e-9
    for mine, other in zip(both[True], both[False], strict=True):
        assert mine.finish_reason == other.finish_reason == "length"
        for field in ("logprobs", "raw_logprobs", "entropies"):
            assert getattr(mine, field) == pytest.approx(getattr(other, field), abs=close)
        for one, two in zip(mine.top_logprobs, other.top_logprobs, strict=True):
            assert [t for t, _ in one] == [t for t, _ in two]
    texts = {tuple(tokens[:n]) for tokens in given for n in range(len(tokens))}
    assert both[True].stats.rows == len(texts) < both[False].stats.rows == sum(map(len, given))


def test_given_texts_with_rules_have_their_own_rows():
    """A function is called with the text of a sample, and with no other."""
    seen = []

    def note(ids, logits):
        seen.extend(map(tuple, ids.tolist()))
        return logits

    given = [[1, 2, 3, 4], [1, 2, 5, 6]]
    engine = csd.Engine(**model_of("float64"))
    csd.score(engine, PROMPTS[0], given, logits_processor=note)
    texts = [tuple(PROMPTS[0] + tokens[:n]) for tokens in given for n in range(4)]
    assert sorted(seen) == sorted(texts)
