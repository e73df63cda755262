"""Slots as plain values: plans are applied to them as an engine's slots do, without a model."""

from csd.engine.options.params import SamplingParams
from csd.engine.plan import Advanced, Begun, Ended, Failed, StepView
from csd.engine.requests.request import Request
from csd.engine.results.result import Sample
from csd.state.kv_cache import pages_for


def request_of(index, samples=1, prompt=2, length=8, seed=0, first=0):
    """A request of `samples` samples of `length` tokens after a prompt of `prompt` tokens."""
    params = SamplingParams(max_new_tokens=length)
    return Request.of(index, [5] * prompt, params, range(first, first + samples), seed)


class Drawn:
    """A sample in flight, for what a policy reads of it."""

    def __init__(self, request, index):
        self.request, self.index, self.done = request, index, False
        self.tokens, self.logprobs, self.raw_logprobs, self.likely = [], [], [], []

    def result(self, reason, texts=True):
        return Sample(self.index, None, self.tokens, [], [], reason), ""


class PlainSlots:
    """`count` slots and `pages` pages. passes: prompts that are read between two steps."""

    def __init__(self, count, pages=1000, passes=1000):
        self.owners = [None] * count
        self.pages, self.passes = pages, passes
        self.active, self.reading = [], []
        self.steps = self.passed = 0
        self.shared = {}  # by request, the one whose pages it has

    @property
    def held(self):
        return sum(
            pages_for(live.request.params.max_new_tokens)
            for live in self.owners
            if live is not None
        )

    def view(self):
        prompts = {id(self.shared.get(r.index, r)): r for r in (*self.active, *self.reading)}
        read = sum(pages_for(len(request.prompt) - 1) for request in prompts.values())
        assert self.held + read <= self.pages
        return StepView(
            slots=len(self.owners),
            free=tuple(s for s, live in enumerate(self.owners) if live is None),
            active=tuple(self.active),
            reading=tuple(self.reading),
            reads_on=self.passed < self.passes or not any(self.owners),
            pages=self.pages,
            free_pages=self.pages - self.held - read,
            held_pages=self.held,
            groups=len({id(self.shared.get(r.index, r)) for r in self.active}),
            steps=self.steps,
        )

    def apply(self, plan):
        events = []
        for request in plan.end:
            events.append(self.end(request))
        for request, mate in plan.join:
            self.shared[request.index] = self.shared.get(mate.index, mate)
            self.active.append(request)
            events.append(Begun(request, joined=True))
        for start in plan.start:
            assert self.owners[start.slot] is None
            start.request.progress.waiting.remove(start.index)
            live = Drawn(start.request, start.index)
            start.request.progress.live[start.index] = self.owners[start.slot] = live
        for request in plan.read[:1]:
            if request not in self.reading:
                self.reading.append(request)
                events.append(Begun(request))
            if self.passed < self.passes or not any(self.owners):
                self.passed += 1
                self.reading.remove(request)
                self.active.append(request)
        return events

    def end(self, request):
        rest = [s for s in request.result() if s.index not in request.progress.finished]
        request.progress.finished |= {sample.index: sample for sample in rest}
        for s, live in enumerate(self.owners):
            if live is not None and live.request is request:
                self.free(s)
        request.progress.waiting.clear()
        for held in (self.active, self.reading):
            if request in held:
                held.remove(request)
        return Ended(request, rest)

    def free(self, s):
        live, self.owners[s] = self.owners[s], None
        live.done = True
        del live.request.progress.live[live.index]

    def step(self, length=None):
        """A token for each sample; those of `length` tokens, by default the most, end."""
        self.steps, self.passed = self.steps + 1, 0
        events = []
        for s, live in enumerate(self.owners):
            if live is None:
                continue
            live.tokens.append(self.steps)
            sample = None
            if len(live.tokens) >= (length or live.request.params.max_new_tokens):
                sample, _ = live.result("length")
                live.request.progress.finished[live.index] = sample
                self.free(s)
            events.append(Advanced(live.request, live, live.tokens[-1:], "", sample))
        return events

    def run(self, policy, most=10_000):
        """Draw until the policy ends the run; returns the samples in the order of their start."""
        begun = []
        for _ in range(most):
            plan = policy.plan(self.view())
            if plan is None:
                return begun
            events = self.apply(plan)
            begun += [(start.request.index, start.index) for start in plan.start]
            for event in events:
                policy.note(event)
            if plan.read or events:
                continue
            for event in self.step():
                policy.note(event)
        raise AssertionError("the policy plans without an end")


def fails(request, error, index=None):
    return Failed(request, error, index)
