"""Past samples of a prompt draft for its next ones, and change none of their tokens."""

import numpy as np
import pytest
import torch
from helpers.models.checkpoints import VOCAB, build
from helpers.models.scripted import Letters, PrefixSum, counting, engine
from helpers.runs.engine_cases import PROMPTS, assert_same_samples
from helpers.targets import few

import csd
from csd.graph.history import MAX_CAPACITY, MIN_CAPACITY, PastSample, capacity_for, max_history
from csd.state.context_table import GraphConfig

pytestmark = pytest.mark.quick

OPTIONS = dict(num_samples=4, max_new_tokens=24, seed=3, temperature=0.9)


@pytest.fixture(scope="module")
def model():
    made = build("llama", dtype=torch.float64)
    made.generation_config.eos_token_id = None
    return csd.Engine(made)


@pytest.fixture(scope="module")
def plain(model):
    return [csd.generate(model, p, speculate=False, **OPTIONS) for p in PROMPTS]


def histories(plain):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(VOCAB, (40, 300), generator=generator).tolist()
    return {
        "right": plain[0].tokens,
        "samples": plain[0],
        "foreign": plain[1].tokens,
        "wrong": [[*t[::-1], 3] for t in plain[0].tokens],
        "empty": [],
        "empty samples": [[], []],
        "huge": noise + plain[0].tokens,
        "one token": [[5]],
        "tensors": [torch.tensor(t) for t in plain[0].tokens],
    }


@few(5)
@pytest.mark.parametrize("kind", histories([csd.Samples([], 0, [], None)] * 2))
@pytest.mark.parametrize("budget", [0, 5, 40])
def test_tokens_are_those_without(model, plain, kind, budget):
    history = histories(plain)[kind]
    out = csd.generate(model, PROMPTS[0], history=history, budget=budget, **OPTIONS)
    assert_same_samples([out], [plain[0]])


def test_right_history_drafts_nearly_everything(model, plain):
    alone = csd.generate(model, PROMPTS[0], budget=16, **OPTIONS)
    out = csd.generate(model, PROMPTS[0], history=plain[0], budget=16, **OPTIONS)
    assert out.stats.tokens_per_step > 1.5 * alone.stats.tokens_per_step
    assert out.stats.accepted["history"] > out.stats.nodes_accepted / 2
    assert alone.stats.accepted["history"] == 0
    assert out.stats.history_tokens == sum(map(len, plain[0].tokens))


def test_it_is_its_own_prompts_only():
    """A prompt's history is not drafted for another prompt of the same call."""
    model = counting(8)
    e = engine(model, max_slots=1)
    prompts = [[0], [0, 1, 2, 3]]
    past = [[[1, 2, 3, 4, 5, 6, 7]], None]
    after = e.generate(prompts, history=past, max_new_tokens=6, budget=16)
    alone = e.generate(prompts, max_new_tokens=6, budget=16)
    assert after[0].stats.accepted["history"] > 0
    assert after[1].stats.accepted == alone[1].stats.accepted
    assert after[1].stats.nodes_proposed == alone[1].stats.nodes_proposed
    # a store has nothing for a prompt that differs in its last token
    h = csd.History()
    h.add([1, 2, 3], [[4]])
    assert h.of([1, 2, 3]) and not h.of([1, 2]) and not h.of([1, 2, 4])


def test_a_store_is_read_before_and_added_to_after(model):
    h = csd.History(samples=3)
    first = csd.generate(model, PROMPTS, history=h, budget=16, **OPTIONS)
    assert len(h) == 2 and [s.stats.history_tokens for s in first] == [0, 0]
    kept = [e.tokens.tolist() for e in h.of(PROMPTS[0])]
    assert kept == first[0].tokens[:0:-1]
    again = csd.generate(model, PROMPTS, history=h, budget=16, **OPTIONS)
    assert_same_samples(again, first)
    assert again[0].stats.accepted["history"] > 0
    assert [e.age for e in h.of(PROMPTS[0])] == [0, 0, 0]


def test_a_store_takes_one_addition_of_a_prompt_a_call(model):
    h = csd.History(samples=20)
    twice = [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    for _ in range(2):
        csd.generate(model, twice, history=h, **OPTIONS)
    assert sorted(e.age for e in h.of(PROMPTS[0])) == [0] * 8 + [1] * 8


def test_with_top_the_targets_probabilities_enter(model, plain):
    h = csd.History(top=True)
    csd.generate(model, PROMPTS[0], history=h, **OPTIONS)
    ids, probs = h.of(PROMPTS[0])[0].top
    assert ids.shape == probs.shape == (24, 8)
    assert (np.diff(probs.astype(float), axis=1) <= 0).all()
    out = csd.generate(model, PROMPTS[0], history=h, budget=16, **OPTIONS)
    assert_same_samples([out], [plain[0]])
    assert out.stats.accepted["history"] > 0


def test_cancelled_samples_are_not_kept():
    e = engine(PrefixSum(sharpness=4.0), max_slots=2)
    h = csd.History(samples=99)
    out = e.generate(
        [1, 2],
        num_samples=8,
        max_new_tokens=30,
        seed=0,
        stop_token_ids=[0, 1, 2],
        history=h,
        until=lambda prefix: len(prefix) >= 3,
    )
    done = [s.tokens for s in out if s.finish_reason != "cancelled"]
    assert [x.tokens.tolist() for x in h.of([1, 2])][::-1] == done


def test_a_closed_stream_keeps_what_had_finished():
    e, h = engine(counting(8), max_slots=1), csd.History()
    stream = e.stream([0], num_samples=3, max_new_tokens=4, history=h)
    _, sample = next(stream)
    stream.close()
    assert [x.tokens.tolist() for x in h.of([0])] == [sample.tokens]


def test_texts_are_a_history():
    e = engine(counting(26), Letters())
    out = e.generate("a", max_new_tokens=6, budget=8, history=["bcdefgh"], stop="g")
    assert out.texts == ["bcdef"] and out.stats.accepted["history"] > 0


def test_steps_go_on_while_a_long_history_enters(model):
    """Admission of a prompt with much history does not stop the samples of another."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(VOCAB, (60, 400), generator=generator).tolist()
    small = csd.Engine(build("llama", dtype=torch.float64), max_slots=2)
    order = []

    def tokens(prompt, sample, new, text):
        order.append(prompt)

    out = small.generate(
        [PROMPTS[0], PROMPTS[0][:-1], PROMPTS[1]],
        history=[None, None, noise],
        max_new_tokens=40,
        callback=tokens,
        budget=4,
        seed=0,
        ignore_eos=True,
    )
    plain = small.generate(PROMPTS[1], max_new_tokens=40, seed=0, speculate=False, ignore_eos=True)
    assert_same_samples(out[2:], [plain])
    assert out[2].stats.history_tokens == 60 * 400


def test_prompts_that_were_long_come_first():
    e = engine(counting(8), max_slots=1)
    prompts = [[0], [1], [2], [3]]
    history = [[[1] * 3], [[1] * 9, [1]], None, [[1] * 7, [1] * 9]]
    ended = [i for i, _ in e.stream(prompts, history=history, max_new_tokens=3)]
    # the third is taken for an average one of (3 + 5 + 8) / 3
    assert ended == [3, 2, 1, 0]
    assert [i for i, _ in e.stream(prompts, max_new_tokens=3)] == [0, 1, 2, 3]


@pytest.mark.parametrize("static", [False, True])
def test_static_steps_and_lag_draw_the_same(static):
    made = build("qwen2", dtype=torch.float64)
    for lag in (0, 2):
        e = csd.Engine(made, static=static, lag=lag)
        first = e.generate(PROMPTS, **OPTIONS)
        # a fixed budget: "auto" may find that drafts do not pay
        again = e.generate(PROMPTS, history=first, budget=16, **OPTIONS)
        assert_same_samples(again, first)
        assert all(out.stats.accepted["history"] for out in again)


def test_capacity_follows_the_number_of_tokens(model, monkeypatch):
    config = GraphConfig()
    assert capacity_for(0, config) == MIN_CAPACITY
    assert capacity_for(60_000, config) == 1 << 19
    assert capacity_for(10**9, config) == MAX_CAPACITY
    e = csd.Engine(build("llama", dtype=torch.float64))
    e.generate([1, 2], max_new_tokens=4)
    assert e.caches.drafter.config.capacity == MIN_CAPACITY
    text = [[i % VOCAB for i in range(k, k + 30_000)] for k in range(2)]
    e.generate([1, 2], history=text, max_new_tokens=4)
    assert e.caches.drafter.config.capacity == 1 << 19
    # it does not shrink, so that calls that alternate keep their step
    step = e.caches.step
    e.generate([1, 2], max_new_tokens=4)
    assert e.caches.step is step


def test_dropped_contexts_are_reported(monkeypatch):
    monkeypatch.setattr("csd.graph.history.MAX_CAPACITY", 1 << 10)
    config = GraphConfig(orders=(1, 2, 3, 5, 8))
    history = [PastSample.of([1] * 30) for _ in range(5)]
    assert max_history(history, 1, config) == 3
    assert max_history(history, 2, config) == 1
    e = engine(counting(8))
    out = e.generate([0], history=[[7] * 30, [6] * 30, [1, 2, 3] * 10], max_new_tokens=4)
    assert out.stats.history_tokens == 90 and out.stats.history_left_out == 0
    out = e.generate([0], history=[[7] * 90, [1, 2, 3]], max_new_tokens=4)
    # the newest stay
    assert out.stats.history_tokens == 93
    out = e.generate([0], history=[[7] * 101, [1, 2, 3]], max_new_tokens=4)
    assert (out.stats.history_tokens, out.stats.history_left_out) == (3, 101)


def test_contexts_without_room_are_counted():
    """A small table cannot hold what one insert brings to a bucket."""
    from csd.graph.consensus import ConsensusGraph

    def small(ops, device):
        return ConsensusGraph(ops, device, GraphConfig(capacity=16))

    e = engine(counting(32))
    out = e.generate([0], history=[list(range(32)) * 4], max_new_tokens=4, drafter=small)
    assert out.stats.contexts_dropped > 0
    assert e.generate([0], max_new_tokens=4).stats.contexts_dropped == 0


@pytest.mark.parametrize("verifier", ["canonical", "recursive", "kseq"])
def test_verifiers_that_draw_their_drafts_refuse_it(model, verifier):
    for history in (csd.History(), [[1, 2]]):
        with pytest.raises(ValueError, match=f"history needs verifier='match'.*{verifier}"):
            csd.generate(model, PROMPTS[0], history=history, verifier=verifier, **OPTIONS)


BAD = {
    "a text": ("ab", TypeError, "history must be a csd.History or a list"),
    "a number": (3, TypeError, "history must be a csd.History or a list"),
    "ids alone": ([1, 2], TypeError, r"history\[0\] must be the token ids or the text of a sample"),
    "floats": ([[1.0]], TypeError, r"history\[0\] must be the token ids or"),
    "outside": ([[1], [VOCAB]], ValueError, rf"history\[1\] has token id {VOCAB}, outside"),
    "negative": ([[-1]], ValueError, r"history\[0\] must hold token ids"),
    "beyond 32 bits": ([[1 << 40]], ValueError, r"history\[0\] must hold token ids"),
    "no tokenizer": (["ab"], ValueError, r"history\[0\] is text, but there is no tokenizer"),
}


@pytest.mark.parametrize(("history", "error", "message"), BAD.values(), ids=BAD)
def test_bad_history(model, history, error, message):
    with pytest.raises(error, match=message):
        csd.generate(model, PROMPTS[0], history=history)


def test_history_of_many_prompts_has_an_entry_for_each(model, plain):
    with pytest.raises(ValueError, match="one entry for each of 2 prompts, got 1"):
        csd.generate(model, PROMPTS, history=[[[1]]])
    with pytest.raises(ValueError, match="one entry for each of 2 prompts, got one"):
        csd.generate(model, PROMPTS, history=plain[0])
    with pytest.raises(ValueError, match=r"history\[1\] must have samples of the same prompt"):
        csd.generate(model, PROMPTS, history=[plain[0], plain[0]])


def test_a_store_of_another_vocabulary_is_refused(model):
    h = csd.History()
    h.add(PROMPTS[0], [[VOCAB + 5]])
    with pytest.raises(ValueError, match=f"history has token id {VOCAB + 5}, outside"):
        csd.generate(model, PROMPTS[0], history=h)


def test_drafters_that_take_none_refuse_it(model):
    with pytest.raises(ValueError, match="history needs drafter='consensus', got"):
        csd.generate(model, PROMPTS[0], history=[[1, 2]], drafter="prompt-lookup")
    # and the engine can be used afterwards
    assert len(csd.generate(model, PROMPTS[0], max_new_tokens=2)[0].tokens) == 2


def test_without_drafts_nothing_enters(model, plain):
    out = csd.generate(model, PROMPTS[0], history=plain[0], speculate=False, **OPTIONS)
    assert_same_samples([out], [plain[0]])
    assert out.stats.history_tokens == out.stats.nodes_proposed == 0
