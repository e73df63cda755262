"""What a step costs by its rows: a table of timed steps, and how late steps correct it."""

import pytest

from csd.engine.step_cost import AGAIN, LAST, CostModel


def test_cost_is_linear_between_sizes_and_beyond():
    cost = CostModel([1, 4, 8], [10.0, 10.0, 14.0])
    assert [cost(m) for m in (1, 2, 4, 6, 8, 12)] == [10, 10, 10, 12, 14, 18]


def test_more_rows_never_cost_less():
    # what was timed while the machine was busy is too much, and not what follows too little
    assert CostModel([1, 2, 4], [3.0, 2.0, 5.0]).seconds == [2.0, 2.0, 5.0]


def test_measure_runs_every_size_in_turn():
    seen = []
    cost = CostModel.measure(seen.append, [1, 8], repeats=3)
    assert sorted(seen) == [1] * 4 + [8] * 4
    assert len(cost.seconds) == 2


def test_sizes_that_are_never_worth_their_time_are_not_timed(monkeypatch):
    now, seen = [0.0], []
    monkeypatch.setattr("csd.engine.step_cost.time.perf_counter", lambda: now[0])

    def run(rows):
        seen.append(rows)
        now[0] += rows

    cost = CostModel.measure(run, [1, 2, 4, 8, 16, 32], worth=6.0)
    assert cost.sizes == [1, 2, 4, 8] and cost.seconds == [1, 2, 4, 8]
    # beyond them the last two go on
    assert max(seen) == 8 and cost(16) == 16


def test_sizes_and_seconds_must_match():
    with pytest.raises(ValueError, match="seconds must be one per size"):
        CostModel([1, 2], [1.0])


def test_a_load_on_every_step_changes_nothing():
    """Steps of both kinds take three times as long."""
    late = CostModel([1, 64], [10.0, 28.9]).late
    for load in [1] * 20 + [3] * 20:
        late.learn_plain(1, 10.0 * load)
        late.learn_drafted(1, 11, 14.0 * load)
    assert late.plain(1) == 30.0 and late.ratio(1, 11) == pytest.approx(1.4)


@pytest.mark.parametrize("what", ["plain", "drafted"])
def test_one_slow_step_changes_nothing(what):
    late = CostModel([1, 64], [10.0, 28.9]).late
    for _ in range(8):
        late.learn_plain(1, 10.0)
        late.learn_drafted(1, 11, 13.0)
    before = late.plain(1), late.ratio(1, 11)
    if what == "plain":
        assert late.learn_plain(1, 90.0)
        # one that is as expected says that the other was an accident
        assert not late.learn_plain(1, 10.0)
    else:
        assert late.learn_drafted(1, 11, 90.0)
    assert (late.plain(1), late.ratio(1, 11)) == pytest.approx(before)


def test_two_slow_steps_are_another_load():
    late = CostModel([1, 64], [10.0, 28.9]).late
    for _ in range(8):
        late.learn_plain(1, 10.0)
        late.learn_drafted(1, 11, 13.0)
    # the load doubles: these are compared with what is no more
    late.learn_drafted(1, 11, 26.0)
    late.learn_drafted(1, 11, 26.0)
    late.learn_plain(1, 20.0)
    late.learn_plain(1, 20.0)
    assert late.plain(1) == 20.0 and late.ratio(1, 11) == pytest.approx(1.3)


def test_what_steps_take_is_estimated_again_after_a_few():
    late = CostModel([1, 8, 64], [10.0, 12.1, 28.9]).late
    for _ in range(2 * LAST):
        late.learn_plain(1, 10.0)
        late.learn_drafted(1, 11, 13.0)
    before = late.curve(1, 11)
    assert before(11) == pytest.approx(late.ratio(1, 11))
    seen = []
    for _ in range(2 * LAST):
        late.learn_drafted(1, 11, 17.0)
        seen.append(late.curve(1, 11)(11))
    # it follows, in steps of a few
    assert seen == sorted(seen) and len(set(seen)) <= 2 * LAST / AGAIN + 1
    assert seen[-1] == pytest.approx(1.7) and late.ratio(1, 11) == pytest.approx(1.7)


def test_a_call_begins_between_what_the_last_one_accepted_and_what_was_recorded():
    late = CostModel([1, 64], [1.0, 1.0]).late
    first = late.calibrate()
    assert float(first) == 1
    for _ in range(40):
        first.learn(4.0, 2.0)
    assert 0.5 < float(first) < 0.56
    assert float(late.calibrate()) == pytest.approx((1 + float(first)) / 2)
