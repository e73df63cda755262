"""The sentence on what saved time, by the counts of a call."""

import random
from itertools import combinations

import pytest

import csd
from csd.engine.results.savings import alike, common_tokens, shared, told
from csd.engine.results.stats import Stats
from csd.models.demo import toy

pytestmark = pytest.mark.quick


def common_of(texts):
    return next(
        i for i in range(99) if len({t[i] if i < len(t) else -j for j, t in enumerate(texts)}) > 1
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_beginning_is_the_one_that_saves_most(seed):
    rng = random.Random(seed)
    texts = [[rng.randrange(1, 3) for _ in range(rng.randrange(1, 8))] for _ in range(6)]
    count, length = alike(texts)
    best = max((n - 1) * common_of(some) for n in range(2, 7) for some in combinations(texts, n))
    assert (count - 1) * length == best
    assert any(common_of(some) >= length for some in combinations(texts, count))


@pytest.mark.parametrize("seed", range(20))
def test_beginnings_that_are_read_once(seed):
    """The tokens that are left are the different beginnings of any length."""
    rng = random.Random(seed)
    texts = [[rng.randrange(1, 3) for _ in range(rng.randrange(1, 8))] for _ in range(6)]
    total = sum(map(len, texts))
    left = len({tuple(text[:n]) for text in texts for n in range(1, len(text) + 1)})
    assert common_tokens(texts[0], texts[0]) == len(texts[0])
    assert shared(out_of(texts, sample_steps=2 * total, rows=total)) == total / left
    # a sample at a time
    assert shared(out_of(texts, sample_steps=total, rows=total)) == 1


def test_without_two_texts_none_is_common():
    assert alike([]) == alike([[1, 2]]) == (0, 0)


def out_of(tokens, **stats):
    samples = [csd.Sample(i, "", t, [], [], "stop") for i, t in enumerate(tokens)]
    return csd.Samples(samples, 0, [], Stats(tokens=sum(map(len, tokens)), **stats))


ALIKE = [[*range(31), 50 + i] for i in range(8)]


def test_what_saved_most_stands_first():
    beginnings = "8 answers began alike for 31 tokens: read once"
    rows = {"sample_steps": 256, "rows": 39}
    assert told(out_of(ALIKE, **rows)) == beginnings
    drafts = {"draft_gain": 1.3, "nodes_proposed": 90, "nodes_accepted": 60}
    guesses = "60 of 256 tokens were guessed right, 1.30 times as fast as without guesses"
    assert told(out_of(ALIKE, **rows, **drafts)) == f"{beginnings}; {guesses}"
    # more tokens a step than rows that were saved
    few = {"sample_steps": 100, "rows": 140}
    assert told(out_of(ALIKE, **few, **drafts)).startswith(f"{guesses}; 8 answers began alike")
    # samples of which one was in flight at a time share no row, though their texts begin alike
    assert told(out_of(ALIKE, sample_steps=256, rows=256), 0.1).startswith("no equal beginnings")


def test_where_nothing_is_saved_the_changes_that_save_are_named():
    apart = [[i, 1, 2] for i in range(2)]
    words = told(out_of(apart, sample_steps=6, rows=6, draft_gain=0.9), 1.0)
    for change in ("a temperature of 0.2", "8 samples or more", "answers of 400 tokens"):
        assert change in words
    many = [[i] * 300 for i in range(16)]
    kept = told(out_of(many, sample_steps=4800, rows=4800), 0.2)
    assert kept == "no equal beginnings and no guesses saved time"
    # a call that gains needs no advice
    assert "would" not in told(out_of(ALIKE, sample_steps=256, rows=39), 1.0)


def test_a_call_of_equal_answers_reads_them_once():
    model, tokenizer = toy()
    with csd.Engine(model, tokenizer=tokenizer, self_check=False) as engine:
        out = engine.generate("a b", num_samples=4, max_new_tokens=20, temperature=0.0, seed=0)
    assert len({tuple(tokens) for tokens in out.tokens}) == 1
    if out.stats.rows < out.stats.sample_steps + out.stats.nodes_proposed:
        assert "4 answers began alike for " in told(out)
