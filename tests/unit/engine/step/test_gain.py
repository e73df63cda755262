"""The statistics say by measured steps whether drafts paid, and if not, why."""

from types import SimpleNamespace

import pytest

import csd
from csd.engine.results.stats import Stats, shared_ngrams
from csd.engine.step.budget import AutoBudget, StepTimeTable
from csd.engine.step.budget.auto import MIN_STEPS, Gain
from csd.models.demo import toy

TABLE = StepTimeTable([1, 8, 16, 32], [1.0, 1.2, 1.8, 3.0])


def record(rows, count, seconds, draft=0.0, accepted=0):
    return SimpleNamespace(
        rows=rows,
        count=count,
        nodes=[1] * len(count),
        costs=[0] * (rows - len(count)),
        expected=float(accepted),
        accepted=accepted,
        draft_seconds=draft,
        model_seconds=seconds - draft,
    )


def test_steps_without_drafts_gain_nothing_and_lose_the_time_of_drafting():
    control = AutoBudget(TABLE).control
    for _ in range(MIN_STEPS):
        control.update(8, 8, record(8, [1] * 8, 1.5, draft=0.3), [1.0] * 8)
    assert control.gain.ratio == pytest.approx(1.2 / 1.5)


def test_a_drafted_step_replaces_one_step_per_token_of_a_slot():
    control = AutoBudget(TABLE).control
    for _ in range(MIN_STEPS):
        control.update(8, 8, record(8, [1] * 8, 1.2), [1.0] * 8)
    for _ in range(MIN_STEPS):
        # two tokens per slot in 1.8 s, in place of two steps of 1.2 s
        control.update(8, 8, record(16, [2] * 8, 1.8, accepted=8), [1.0] * 8)
    assert control.gain.ratio == pytest.approx((1.2 + 2.4) / (1.2 + 1.8))
    assert control.double_cost == pytest.approx(1.8 / 1.2, rel=0.05)


def test_few_steps_give_no_gain():
    gain = Gain()
    for _ in range(MIN_STEPS - 1):
        gain.add(8, 16, 1.0, 1.0)
    assert gain.ratio is None
    gain.add(8, 16, 1.0, 1.0)
    assert gain.ratio == pytest.approx(2.0)


def test_shared_ngrams():
    text = list(range(20))
    assert shared_ngrams([text, text]) == 1.0
    assert shared_ngrams([text, list(range(100, 120))]) == 0.0
    # 13 8-grams each, of which the first 3 are the other's too
    assert shared_ngrams([text, [*text[:10], *range(50, 60)]]) == pytest.approx(3 / 13)
    # a text's own repetitions are not shared
    assert shared_ngrams([[1] * 20, text]) == 0.0
    assert shared_ngrams([[1, 2], [3]]) is None


def test_the_last_line_of_the_statistics():
    assert str(Stats(draft_gain=1.24)).endswith("\ndrafts: 1.24 x plain")
    poor = Stats(draft_gain=0.98, slots=8, double_cost=1.94, shared_ngrams=0.031)
    assert str(poor).endswith(
        "\ndrafts do not pay here (0.98 x plain): a step that checks a draft for each of 8 samples "
        "takes 1.9 times as long as one without, and 3% of the samples' runs of 8 tokens stand in "
        "another sample"
    )
    assert Stats(draft_gain=1.02).drafts == "drafts bring little here (1.02 x plain)"
    assert Stats().drafts == "" and not Stats().pays


def test_a_call_explains_its_drafts():
    model, tokenizer = toy()
    with csd.Engine(model, tokenizer=tokenizer, self_check=False) as engine:
        out = engine.generate("a b a b", num_samples=4, max_new_tokens=60, temperature=2.0, seed=0)
        assert out.stats.draft_gain is not None and out.stats.slots == 4
        assert str(out.stats).endswith(out.stats.drafts) and "drafts" in out.stats.drafts
        if not out.stats.pays:
            assert out.stats.shared_ngrams == shared_ngrams(out.tokens)
        plain = engine.generate("a b a b", num_samples=4, max_new_tokens=60, speculate=False)
        assert plain.stats.draft_gain is None and plain.stats.drafts == ""
