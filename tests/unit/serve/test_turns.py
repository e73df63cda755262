"""Shares of the slots: by steps, with samples of one length, so that a turn takes one length."""

import random

import pytest
from helpers.models.scripted import PrefixSum, engine
from helpers.runs.engine_cases import free, plain

import csd
from csd.engine.slots import HostSlots
from csd.serve.turns import Turns, share_of

LENGTH = 12


@pytest.fixture
def begun(monkeypatch):
    """(step, owner) of each sample that begins, and the owners' samples in flight after it."""
    seen, start = [], HostSlots._start

    def watched(self, begun):
        start(self, begun)
        owners = [o.request.scope for o in self.owners if o is not None]
        live = {owner: owners.count(owner) for owner in owners}
        seen.append((self.steps, begun.request.scope, live))

    monkeypatch.setattr(HostSlots, "_start", watched)
    return seen


@pytest.mark.parametrize(
    ("slots", "wanted", "share"),
    [
        (8, [100, 1], 7),
        (8, [100, 100], 4),
        (8, [100, 1, 100], 4),
        (8, [2, 2], 8),
        (4, [9] * 9, 1),
        (7, [100, 100], 4),
        (6, [3, 3, 100], 2),
        (1, [1, 1], 1),
    ],
)
def test_slots_that_some_leave_are_divided_among_others(slots, wanted, share):
    assert share_of(slots, wanted) == share


def test_turns_go_round():
    turns, served = Turns(), []
    for _ in range(9):
        owner = turns.order(3, {}, {"a": 5, "b": 5, "c": 5})[0]
        turns.served(owner)
        served.append(owner)
    assert served == ["a", "b", "c"] * 3


@pytest.mark.parametrize("memory", ["ample", "short"])
def test_a_request_of_many_samples_leaves_others_their_share(monkeypatch, begun, memory):
    """It holds all slots when others come; each of these begins before its next round is over."""
    model, slots = PrefixSum(sharpness=3.0), 8
    if memory == "short":
        from csd.engine.resources import caches as room

        monkeypatch.setattr(room.Room, "bytes", lambda self, *_: self.pages)
        monkeypatch.setattr(room, "changed_bytes", lambda *_: 0)
        monkeypatch.setattr(room, "free_bytes", lambda _: 10)
    e = engine(model, max_slots=slots, memory=1.0)
    service = csd.AsyncEngine(e, max_tokens=200, speculate=False)
    options = dict(max_new_tokens=LENGTH, seed=1)
    many = service.submit([1, 2], owner="many", num_samples=8 * slots, detached=True, **options)
    next(iter(many))
    first = len(begun)
    late = [service.submit([3 + i, 4], owner=f"{i}", num_samples=2, **options) for i in range(3)]
    late += [service.submit([7, 8] * 40, num_samples=9, **options)]
    for i, handle in enumerate(late[:3]):
        assert handle.result(60).tokens == [plain(model, [3 + i, 4], 1, k, LENGTH) for k in (0, 1)]
    assert late[3].result(60).tokens == [plain(model, [7, 8] * 40, 1, k, LENGTH) for k in range(9)]
    assert many.result(60).tokens == [plain(model, [1, 2], 1, k, LENGTH) for k in range(8 * slots)]
    others = [i for i, (_, owner, _) in enumerate(begun) if owner != "many"]
    rounds = 2 if memory == "ample" else 6
    assert begun[others[8]][0] - begun[first - 1][0] <= rounds * (LENGTH + 2)
    # while the last request waits, the first has its share at most
    last = max(i for i, (_, owner, _) in enumerate(begun) if owner not in ("many", "0", "1", "2"))
    held = [live["many"] for _, owner, live in begun[others[0] : last] if owner == "many"]
    assert held and max(held) <= slots // 2
    assert free(service)


def test_owners_in_any_order_get_their_samples():
    """Random requests of few owners, in little memory: all end, and with `generate`'s tokens."""
    model, drawn = PrefixSum(sharpness=3.0), random.Random(4)
    service = csd.AsyncEngine(engine(model, max_slots=3), max_tokens=200, max_queue=100)
    asked = [
        (
            drawn.choices(range(1, 5), k=drawn.choice([2, 2, 70])),
            drawn.choice("ab"),
            drawn.randint(1, 5),
            drawn.randint(1, 20),
        )
        for _ in range(30)
    ]
    handles = [
        service.submit(prompt, owner=owner, num_samples=n, max_new_tokens=length, seed=2)
        for prompt, owner, n, length in asked
    ]
    for (prompt, _, n, length), handle in zip(asked, handles, strict=True):
        want = [plain(model, prompt, 2, i, length) for i in range(n)]
        assert handle.result(60).tokens == want
    assert free(service)
