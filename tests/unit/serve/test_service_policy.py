"""`ServicePolicy` as tables: turns, twins, groups and pages, without an engine or a thread."""

import random

import pytest
from helpers.runs.plain_slots import Drawn, PlainSlots, request_of

from csd.engine.plan import Advanced, Begun, Ended, StepView
from csd.serve.handle import Handle
from csd.serve.policy import ServicePolicy

pytestmark = pytest.mark.quick


class Service:
    """A policy with its requests by name, in flight or waiting."""

    def __init__(self, together=None):
        self.policy = ServicePolicy(together)
        self.active, self.reading = [], []
        self.handles = {}

    def arrive(self, name, owner=None, until=None, **sizes):
        """A request that waits. sizes: of `request_of`."""
        request = request_of(len(self.handles), **sizes)
        request.name = name
        self.handles[name] = handle = Handle(request, owner=owner, until=until)
        self.policy.arrive(handle)
        return handle

    def place(self, name, live=0, reading=False):
        """Let a request be in flight, with so many samples in slots."""
        handle = self.handles[name]
        self.policy.place(handle)
        request = handle.request
        (self.reading if reading else self.active).append(request)
        for _ in range(live):
            index = request.progress.waiting.popleft()
            request.progress.live[index] = Drawn(request, index)
        return handle

    def view(self, slots, **rest):
        live = sum(len(request.progress.live) for request in self.active)
        sizes = dict(pages=100, free_pages=100, groups=len(self.active)) | rest
        return StepView(
            slots, (*range(live, slots),), tuple(self.active), tuple(self.reading), **sizes
        )

    def plan(self, slots, **rest):
        """The plan, with names of requests, and indices of samples that start."""
        plan = self.policy.plan(self.view(slots, **rest))
        if plan is None:
            return None
        shown = {
            "end": [request.name for request in plan.end],
            "join": [(request.name, mate.name) for request, mate in plan.join],
            "start": [(start.request.name, start.index) for start in plan.start],
            "read": [request.name for request in plan.read],
            "ending": plan.ending,
        }
        return {kind: value for kind, value in shown.items() if value}


def test_nothing_in_flight_ends_the_run():
    assert Service().plan(2) is None


def test_owners_take_turns():
    """The one with the fewest samples in flight first, and none beyond its share."""
    service = Service(together=4)
    service.arrive("a", "A", samples=9)
    service.arrive("b", "B", samples=9)
    service.place("a", live=3)
    service.place("b")
    begun = [("b", 0), ("b", 1), ("b", 2), ("a", 3), ("b", 3)]
    assert service.plan(8) == {"start": begun}


def test_a_prompt_is_read_in_its_owners_turn():
    service = Service()
    service.arrive("a", "A", samples=9)
    service.place("a", live=1)
    service.arrive("b", "B", samples=1)
    assert service.plan(4) == {"read": ["b"]}
    service.place("b", reading=True)
    # while it is read, others go on; its owner has no second prompt read
    service.arrive("c", "B", samples=1)
    assert service.plan(4) == {"read": ["b"]}
    # up to their share of the slots
    assert service.plan(4, reads_on=False) == {"start": [("a", 1)]}


@pytest.mark.parametrize(
    ("free_pages", "held", "start"),
    [(9, 3, []), (3, 9, []), (3, 1, [("a", 1)]), (0, 1, [])],
    ids=["ample", "others free enough", "others free too few", "none"],
)
def test_no_sample_takes_the_pages_that_another_owner_waits_for(free_pages, held, start):
    """b needs 5 pages: 4 of its prompt, and one."""
    service = Service(together=4)
    service.arrive("a", "A", samples=9)
    service.place("a", live=1)
    service.arrive("b", "B", samples=1, prompt=250)
    planned = service.plan(3, free_pages=free_pages, held_pages=held)
    want = {"read": ["b"]} if free_pages >= 5 else {"start": start} if start else {}
    assert planned == want


def test_what_never_fits_is_refused():
    service = Service()
    service.arrive("a", samples=1, prompt=640, length=65)
    assert service.plan(2, pages=12) == {"read": ["a"]}
    assert service.plan(2, pages=11) == {"end": ["a"]}
    assert "needs more than the 11 pages" in str(service.policy.ended(service.handles["a"]))


def test_equal_prompts_of_one_owner_are_a_group():
    service = Service()
    service.arrive("a", "A", samples=4, seed=1)
    service.place("a", live=1)
    # another seed: it draws its own samples, and waits for a slot
    service.arrive("b", "A", samples=4, seed=2)
    service.arrive("c", "A", samples=4, prompt=3)
    service.arrive("d", "B", samples=4, seed=1)
    assert service.plan(1) == {}
    assert service.plan(2) == {"read": ["d"]}
    service.place("d", live=1)
    # nothing else is in flight of d, and A's next sample is b's
    assert service.plan(3) == {"join": [("b", "a")]}


def test_those_who_draw_the_same_samples_join_without_a_slot():
    service = Service()
    service.arrive("a", "A", samples=4)
    service.place("a", live=1)
    for name, owner, samples in (("b", "A", 2), ("c", "A", 6), ("d", "B", 4), ("e", None, 4)):
        service.arrive(name, owner, samples=samples)
    assert service.plan(1) == {"join": [("b", "a"), ("c", "a")]}


def test_a_sample_goes_on_for_those_who_wait_for_it():
    service = Service()
    drawer = service.arrive("a", "A", samples=2)
    service.place("a", live=1)
    other = service.arrive("b", "A", samples=3)
    assert service.plan(1)["join"]
    service.place("b")
    policy, request = service.policy, other.request
    assert policy.twins.join(other, [drawer]) == []
    assert request.progress.awaited == {0, 1} and [*request.progress.waiting] == [2]
    policy.stop(drawer)
    assert service.plan(1) == {"end": ["a"]}
    # b has the sample in flight, and begins the other one itself
    assert [*request.progress.live] == [0] and request.progress.live[0].request is request
    assert [*request.progress.waiting] == [2, 1] and not request.progress.awaited
    assert drawer.request.progress.finished[0].finish_reason == "cancelled"


def test_until_and_its_errors_end_one_request():
    service = Service()

    def fails(samples):
        raise KeyError("mine")

    for name, until in (("a", lambda samples: True), ("b", fails), ("c", None)):
        handle = service.arrive(name, samples=3, until=until)
        service.place(name, live=1)
        request = handle.request
        sample, _ = request.progress.live.pop(0).result("length")
        request.progress.finished[0] = sample
        service.policy.change(handle)
    # the slots of all three are free, but two end first
    assert service.plan(6) == {"end": ["a", "b"]}
    errors = [service.policy.ended(service.handles[name]) for name in "ab"]
    assert errors[0] is None and isinstance(errors[1], KeyError)


@pytest.mark.parametrize("count", [1, 2])
def test_shorter_samples_are_favoured_at_the_end_of_one_request(count):
    service = Service()
    for i in range(count):
        service.arrive(f"{i}", samples=1)
        service.place(f"{i}", live=1)
    assert service.plan(2) == ({"ending": True} if count == 1 else {})


class Plainly:
    """A policy with the ends of its requests, as `ServedRequests` follows it."""

    def __init__(self, policy):
        self.policy = policy

    def plan(self, view):
        return self.policy.plan(view)

    def note(self, event):
        policy, handle = self.policy, self.policy.handles[event.request.index]
        match event:
            case Begun(joined=joined):
                policy.place(handle)
                if joined:
                    others = [h for h in policy.handles.values() if h not in policy.queue]
                    policy.twins.join(handle, others)
                    policy.change(handle)
            case Advanced(live=live, sample=sample) if sample is not None:
                others = policy.twins.end(handle.request, live.index)
                for request in (handle.request, *others):
                    policy.change(policy.handles[request.index])
            case Ended():
                assert policy.ended(handle) is None


@pytest.mark.parametrize("seed", range(40))
def test_all_get_their_samples_whatever_the_slots_and_pages(seed):
    drawn = random.Random(seed)
    policy = ServicePolicy(drawn.choice([None, 1, 3]))
    requests = []
    for i in range(drawn.randint(1, 12)):
        request = request_of(
            i,
            drawn.randint(1, 5),
            prompt=drawn.choice([2, 3, 70, 200]),
            length=drawn.randint(1, 70),
            seed=drawn.randint(0, 1),
            first=drawn.randint(0, 2),
        )
        requests.append(request)
        policy.arrive(Handle(request, owner=drawn.choice(["A", "B", None])))
    slots = PlainSlots(drawn.randint(1, 5), drawn.choice([6, 9, 30]), drawn.choice([1, 1000]))
    slots.run(Plainly(policy))
    assert not policy.handles and not policy.queue
    for request in requests:
        assert set(request.progress.finished) == set(request.samples)
        reasons = {sample.finish_reason for sample in request.progress.finished.values()}
        assert reasons == {"length"}
