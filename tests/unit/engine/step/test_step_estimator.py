"""Step times: a table of timed steps, and its correction by the steps of a call."""

import pytest

from csd.engine.first_call.time_steps import measure
from csd.engine.step.budget import StepTimeTable
from csd.engine.step.budget.estimator import StepTimeEstimator


def test_cost_is_linear_between_sizes_and_beyond():
    cost = StepTimeTable([1, 4, 8], [10.0, 10.0, 14.0])
    assert [cost(m) for m in (1, 2, 4, 6, 8, 12)] == [10, 10, 10, 12, 14, 18]


def test_more_rows_never_cost_less():
    # what was timed while the machine was busy is too much, and not what follows too little
    assert StepTimeTable([1, 2, 4], [3.0, 2.0, 5.0]).seconds == [2.0, 2.0, 5.0]


def test_measure_runs_every_size_in_turn():
    seen = []
    cost = measure(seen.append, [1, 8], repeats=3)
    assert sorted(seen) == [1] * 4 + [8] * 4
    assert len(cost.seconds) == 2


def test_sizes_that_are_never_worth_their_time_are_not_timed(monkeypatch):
    now, seen = [0.0], []
    monkeypatch.setattr("csd.engine.first_call.time_steps.time.perf_counter", lambda: now[0])

    def run(rows):
        seen.append(rows)
        now[0] += rows

    cost = measure(run, [1, 2, 4, 8, 16, 32], worth=6.0)
    assert cost.sizes == [1, 2, 4, 8] and cost.seconds == [1, 2, 4, 8]
    # beyond them the last two go on
    assert max(seen) == 8 and cost(16) == 16


def test_sizes_and_seconds_must_match():
    with pytest.raises(ValueError, match="seconds must be one per size"):
        StepTimeTable([1, 2], [1.0])


def test_a_load_on_every_step_changes_nothing():
    """Steps of both kinds take three times as long."""
    times = StepTimeEstimator(StepTimeTable([1, 11, 64], [10.0, 13.0, 28.9]))
    for load in [1] * 40 + [3] * 40:
        times.learn_plain(1, 10.0 * load)
        times.learn_drafted(1, 11, 14.0 * load)
    assert times.plain(1) == pytest.approx(30.0)
    assert times.ratio(1, 11) == pytest.approx(1.4, rel=0.02)


@pytest.mark.parametrize("what", ["plain", "drafted"])
def test_one_slow_step_changes_little(what):
    times = StepTimeEstimator(StepTimeTable([1, 64], [10.0, 28.9]))
    for _ in range(20):
        times.learn_plain(1, 10.0)
        times.learn_drafted(1, 11, 13.0)
    before = times.plain(1), times.ratio(1, 11)
    if what == "plain":
        assert times.learn_plain(1, 90.0)
        assert not times.learn_plain(1, 10.0)
    else:
        assert times.learn_drafted(1, 11, 90.0)
    assert (times.plain(1), times.ratio(1, 11)) == pytest.approx(before, rel=0.4 / 7)


@pytest.mark.parametrize("load", [0.4, 2.0])
def test_two_slow_steps_are_another_load(load):
    times = StepTimeEstimator(StepTimeTable([1, 64], [10.0, 28.9]))
    for _ in range(8):
        times.learn_plain(1, 10.0)
    assert times.learn_plain(1, 10.0 * load) and not times.learn_plain(1, 10.0 * load)
    assert times.plain(1) == pytest.approx(10.0 * load)
    # one above and one below are none
    times.learn_plain(1, 20.0 * load)
    times.learn_plain(1, 5.0 * load)
    assert times.plain(1) == pytest.approx(10.0 * load, rel=0.1)


@pytest.mark.parametrize("true", [0.5, 2.0])
def test_a_table_that_is_wrong_is_corrected_near_the_rows_that_ran(true):
    """Rows beyond the first take `true` times what the table has."""
    sizes = [1, 8, 16, 32, 64]
    times = StepTimeEstimator(StepTimeTable(sizes, [1 + 0.02 * (m - 1) for m in sizes]))
    before = times.ratio(1, 64)
    for _ in range(40):
        times.learn_plain(1, 1.0)
        times.learn_drafted(1, 16, 1 + 0.02 * true * 15)
        times.learn_drafted(1, 8, 1 + 0.02 * true * 7)
    for rows in (8, 12, 16):
        assert times.ratio(1, rows) == pytest.approx(1 + 0.02 * true * (rows - 1), rel=0.02)
    # others move the same way
    assert (times.ratio(1, 64) > before) == (true > 1)
    assert times.ratio(1, 1) >= 1
