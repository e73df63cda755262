"""`CallPolicy` as tables: plain values in, a plan out, without an engine."""

import random

import pytest
from helpers.runs.plain_slots import Drawn, PlainSlots, request_of

from csd.engine.call import RunSettings
from csd.engine.plan import Advanced, Begun, Ended, Failed, StepView
from csd.engine.policy import CallPolicy
from csd.engine.results.result import Sample

pytestmark = pytest.mark.quick


def asked(*samples, live=()):
    """Requests of so many samples; live: how many of each are in flight."""
    made = [request_of(i, n) for i, n in enumerate(samples)]
    for request, count in zip(made, live, strict=False):
        for _ in range(count):
            index = request.progress.waiting.popleft()
            request.progress.live[index] = Drawn(request, index)
    return made


def policy_of(requests, together=None, queued=0, **settings):
    """A policy whose first requests have begun, but for the last `queued`."""
    policy = CallPolicy(requests, RunSettings(**settings), together)
    for request in requests[: len(requests) - queued]:
        policy.note(Begun(request))
    return policy


def shown(plan):
    starts = [(start.slot, start.request.index, start.index) for start in plan.start]
    return starts, [request.index for request in plan.read], plan.ending


# samples, those in flight, together, free slots, active requests, those being read, and whether
# the first may go on; then samples that start (slot, request, index), prompts that are read, ending
TABLE = {
    "one prompt, nothing read": ([4], [], None, [0, 1], 0, 0, True, [], [0], False),
    "its samples fill the slots": (
        [4], [], None, [0, 1], 1, 0, True, [(0, 0, 0), (1, 0, 1)], [], False,
    ),
    "and the last of them": ([2], [1], None, [1], 1, 0, True, [(1, 0, 1)], [], True),
    "no free slot": ([3], [2], None, [], 1, 0, True, [], [], False),
    "one sample each while prompts wait": (
        [3, 3, 3], [], None, [0, 1, 2], 1, 0, True, [(0, 0, 0)], [1, 2], False,
    ),
    "two each": ([3, 3, 3], [1], 2, [1, 2, 3], 1, 0, True, [(1, 0, 1)], [1], False),
    "no more prompts than have slots": ([9, 9, 9], [], 4, [0, 1, 2], 0, 0, True, [], [0], False),
    "two prompts that fit": ([2, 9, 9], [], 4, [0, 1, 2], 0, 0, True, [], [0, 1], False),
    "one that is being read goes first": (
        [2, 2, 2], [1], None, [1, 2], 1, 1, True, [], [1, 2], False,
    ),
    "a step first": ([2, 2, 2], [1], None, [1, 2], 1, 1, False, [], [], False),
    "the samples left go in order": (
        [3, 3], [1, 1], None, [2, 3, 4, 5], 2, 0, True,
        [(2, 0, 1), (3, 0, 2), (4, 1, 1), (5, 1, 2)], [], True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_plans(case):
    samples, live, together, free, active, reading, reads_on, start, read, ending = TABLE[case]
    requests = asked(*samples, live=live)
    policy = policy_of(requests, together, len(samples) - active - reading)
    view = StepView(
        slots=len(free) + sum(live),
        free=tuple(free),
        active=tuple(requests[:active]),
        reading=tuple(requests[active : active + reading]),
        reads_on=reads_on,
    )
    assert shown(policy.plan(view)) == (start, read, ending)
    # a plan changes nothing
    assert shown(policy.plan(view)) == (start, read, ending)


def test_long_ones_begin_first():
    requests = asked(1, 1, 1)
    for request, length in zip(requests, (3, 9, 5), strict=True):
        request.history = [[7] * length]
    plan = CallPolicy(requests, RunSettings(), None).plan(StepView(3, (0, 1, 2)))
    assert shown(plan)[1] == [1, 2, 0]


def ended(request, index, reason="length"):
    live = request.progress.live.pop(index)
    request.progress.finished[index] = sample = Sample(index, None, [1], [], [], reason)
    return Advanced(request, live, [1], "", sample)


def test_until_ends_a_request_once_its_prefix_decides():
    (request,) = asked(4, live=[3])
    seen = []

    def until(samples):
        seen.append([sample.index for sample in samples])
        return len(samples) == 2

    policy = policy_of([request], until=until)
    policy.note(ended(request, 1))
    view = StepView(3, (1,), (request,))
    assert shown(policy.plan(view))[0] == [(1, 0, 3)]
    policy.note(ended(request, 2))
    policy.note(ended(request, 0))
    assert policy.plan(view).end == (request,)
    assert seen == [[0], [0, 1]] and request.progress.decided
    # a sample beyond those that decided counts as cancelled
    assert [request.progress.finished[i].finish_reason for i in range(3)] == ["length"] * 2 + [
        "cancelled"
    ]


def test_a_request_that_is_done_ends():
    first, second = asked(1, 2, live=[1, 1])
    policy = policy_of([first, second])
    policy.note(ended(first, 0))
    assert policy.plan(StepView(2, (0,), (first, second))).end == (first,)
    assert shown(policy.plan(StepView(2, (0,), (second,))))[0] == [(0, 1, 1)]


@pytest.mark.parametrize("returns", [False, True])
def test_an_error_ends_the_call_unless_its_request_asked_for_it(returns):
    first, second = asked(1, 1, live=[1, 1])
    policy = policy_of([first, second], returns_errors=returns)
    for error in (KeyboardInterrupt(), OSError("mine")):
        with pytest.raises(type(error)):
            policy.note(Failed(first, error, 0))
    with pytest.raises(OSError):
        policy.note(Ended(first, [], OSError("of a text")))
    first.progress.fault = ValueError("of its grammar")
    if not returns:
        with pytest.raises(ValueError, match="of its grammar"):
            policy.note(Failed(first, first.progress.fault, 0))
        return
    policy.note(Failed(first, first.progress.fault, 0))
    assert policy.plan(StepView(2, (), (first, second))).end == (first,)
    assert first.progress.error == "of its grammar"


@pytest.mark.parametrize("seed", range(20))
def test_all_samples_begin_once_and_in_order(seed):
    drawn = random.Random(seed)
    together = drawn.choice([None, 1, 2, 5])
    requests = [
        request_of(i, drawn.randint(1, 6), length=drawn.randint(1, 9))
        for i in range(drawn.randint(1, 8))
    ]
    slots = PlainSlots(drawn.randint(1, 5), passes=drawn.choice([1, 2, 1000]))
    begun = slots.run(CallPolicy(requests, RunSettings(), together))
    for request in requests:
        assert [i for r, i in begun if r == request.index] == [*request.samples]
        assert set(request.progress.finished) == set(request.samples)
    firsts = [begun.index((request.index, 0)) for request in requests]
    assert firsts == sorted(firsts)
