"""pass@k without bias, and intervals that cover."""

import itertools
import math

import numpy as np
import pytest

import csd
from csd.evaluate.pass_at_k import mean_interval


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n):
    for c in range(n + 1):
        correct = [i < c for i in range(n)]
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(correct, k))
            expected = sum(map(any, subsets)) / len(subsets)
            assert csd.pass_at_k(correct, k) == pytest.approx(expected)


def test_cancelled_samples_and_what_follows_do_not_count():
    correct = [True, False, None, True, True]
    assert csd.pass_at_k(correct, 1) == 0.5
    assert csd.pass_at_k(correct, 2) == 1
    with pytest.raises(ValueError, match=r"k must lie between 1 and the 2 samples .* got 3"):
        csd.pass_at_k(correct, 3)
    with pytest.raises(ValueError, match="got 0"):
        csd.pass_at_k(correct, 0)
    with pytest.raises(ValueError, match="the 0 samples that count, got 1"):
        csd.pass_at_k([None, True], 1)
    with pytest.raises(TypeError, match=r"k must be a whole number, got 1\.0"):
        csd.pass_at_k(correct, 1.0)
    with pytest.raises(
        ValueError, match=r"correct must be a list of True, False or None, got 0\.5"
    ):
        csd.pass_at_k([0.5, True], 1)
    assert csd.pass_at_k(np.array([True, False, 1]), 1) == pytest.approx(2 / 3)


def test_accuracy_over_the_samples_drawn_in_any_case_is_unbiased():
    """Over all that a vote drew it is not, which is why `Vote.least` is there."""
    p, n = 0.3, 6
    until = csd.Vote(lambda text: text, confidence=0.8)
    fixed, adaptive = 0.0, 0.0
    for outcome in itertools.product([True, False], repeat=n):
        chance = math.prod(p if right else 1 - p for right in outcome)
        samples = [csd.Sample(i, "YN"[not r], [], [], [], "stop") for i, r in enumerate(outcome)]
        used = next(k for k in range(1, n + 1) if until.decided(samples[:k], n))
        assert used >= until.least(n)
        fixed += chance * csd.pass_at_k(outcome[: until.least(n)], 1)
        adaptive += chance * csd.pass_at_k(outcome[:used], 1)
    assert fixed == pytest.approx(p)
    assert abs(adaptive - p) > 0.005


def test_one_sample_a_problem_gives_wilsons_interval():
    values = [1.0] * 7 + [0.0] * 13
    mean, low, high = mean_interval(values)
    from scipy.stats import binomtest

    wilson = binomtest(7, 20).proportion_ci(method="wilson")
    assert mean == 0.35
    assert (low, high) == pytest.approx((wilson.low, wilson.high), abs=1e-6)


def test_an_interval_does_not_collapse_where_all_agree():
    mean, low, high = mean_interval([0.0] * 20, samples=8)
    assert (mean, low) == (0, 0)
    assert 0.1 < high < 0.2
    assert mean_interval([1.0])[1] < 0.3
    with pytest.raises(ValueError, match="at least one problem"):
        mean_interval([])


@pytest.mark.parametrize("spread", [0.3, 1.0, 8.0])
def test_95_percent_intervals_cover(spread):
    """Problems differ in difficulty (Beta), 8 samples each, 30 problems."""
    random = np.random.default_rng(0)
    truth, inside, rounds = 0.3, 0, 1000
    for _ in range(rounds):
        chance = random.beta(truth * spread, (1 - truth) * spread, 30)
        values = random.binomial(8, chance) / 8
        _, low, high = mean_interval(values.tolist(), samples=8)
        inside += low <= truth <= high
    # 95% less what sampling 1,000 rounds and 30 problems costs
    assert inside / rounds > 0.925
