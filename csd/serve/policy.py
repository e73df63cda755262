"""Choice of the request that gets a place or a slot next, from plain values.

Owners take turns (`turns.py`). Requests of one owner with equal prompts are one group while any of
them has samples: later ones join the first one's pages and graph, and those that draw the same
samples (`twins.py`) do so at once. Whatever else is in flight, a request's samples are a function
of its own prompt, seed, indices and parameters.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

from csd.engine.plan import Plan, Starts, StepView
from csd.engine.requests.request import Request
from csd.serve.handle import Handle
from csd.serve.turns import Turns
from csd.serve.twins import Twins, alike
from csd.state.kv_cache import pages_for, pages_held


@dataclass(slots=True)
class PageRoom:
    """Pages that a plan leaves free.

    short: whether they are too few for a request whose turn it is; frees_enough: whether those of
    samples in flight are enough for it.
    """

    free: int
    held: int
    reach: int | None
    short: bool = field(default=False, init=False)
    frees_enough: bool = field(default=False, init=False)

    def has(self, request: Request, prompt: bool = False) -> bool:
        """True if enough pages are free for one sample; prompt: True includes its prompt."""
        pages = pages_of(request, prompt)
        if pages > self.free and not self.short:
            self.short, self.frees_enough = True, pages <= self.free + self.held
        return pages <= self.free

    def take(self, request: Request) -> None:
        """Subtract the pages of a sample."""
        pages = pages_held(pages_for(request.params.max_new_tokens), self.reach)
        self.free, self.held, self.short = self.free - pages, self.held + pages, False


def pages_of(request: Request, prompt: bool) -> int:
    """Number of pages of one sample; prompt: True adds the pages of its prompt."""
    pages = pages_for(request.params.max_new_tokens)
    return pages + pages_for(len(request.prompt) - 1) if prompt else pages


class ServicePolicy:
    """Decides for requests that arrive; whatever fails ends one request alone.

    together: as in `Engine`, by default a quarter of a request's samples: one sample after another,
    a request would last too long.
    """

    def __init__(self, together: int | None = None):
        self.handles: dict[int, Handle] = {}  # of requests that have not ended, by request index
        self.queue: list[Handle] = []  # of these, those without a place
        self.twins, self.turns = Twins(), Turns()
        self._together = together
        self._changed: dict[int, Handle] = {}  # requests that got samples
        self._stopped: dict[int, BaseException | None] = {}  # requests to end, with their errors

    # events

    def arrive(self, handle: Handle) -> None:
        """Let a request wait for its turn."""
        self.handles[handle.request.index] = handle
        self.queue.append(handle)

    def place(self, handle: Handle) -> None:
        """Note that a request's prompt is read, or has joined one that was."""
        self.queue.remove(handle)

    def change(self, handle: Handle) -> None:
        """Note that a request got a sample, which may end it."""
        self._changed[handle.request.index] = handle

    def stop(self, handle: Handle, error: BaseException | None = None) -> None:
        """Let the next plan end a request, with an error or cancelled."""
        self._stopped.setdefault(handle.request.index, error)

    def ended(self, handle: Handle) -> BaseException | None:
        """Forget a request that has ended; returns its error."""
        index = handle.request.index
        del self.handles[index]
        return self._stopped.pop(index, None)

    def owner_of(self, request: Request) -> Hashable:
        """A request's owner; one without is its own."""
        owner = self.handles[request.index].owner
        return request.index if owner is None else owner

    # plans

    def plan(self, view: StepView) -> Plan | None:
        """The next plan; None if nothing is in flight."""
        if end := self._end():
            return Plan(end=end)
        if join := self._twins_of(view):
            return Plan(join=join)
        starts, room = Starts(view), PageRoom(view.free_pages, view.held_pages, view.reach)
        if view.reading and view.reads_on and starts.free:
            return Plan(read=view.reading)
        while starts.free and (request := self._next(view, starts, room)) is not None:
            handle, made = self.handles[request.index], tuple(starts.made)
            if handle not in self.queue:
                starts.add(request)
                room.take(request)
                self.turns.served(self.owner_of(request))
            elif (leader := self._leader(handle, view)) is not None:
                return Plan(start=made, join=((request, leader),))
            elif pages_of(request, prompt=True) <= view.pages:
                return Plan(start=made, read=(request,))
            else:
                self.stop(handle, _too_long(request, view.pages))
                return Plan(start=made, end=self._end())
        if not (view.owned or starts.made or self.queue or view.reading):
            return None
        # the progress penalty makes samples end together, but requests need not end together
        waits = self.queue or view.reading or any(map(starts.waiting, view.active))
        return Plan(start=tuple(starts.made), ending=not waits and len(view.active) == 1)

    def _end(self) -> tuple[Request, ...]:
        """Requests to end: those stopped, and those that have all samples that they need."""
        changed, self._changed = self._changed, {}
        for index, handle in changed.items():
            if index not in self.handles:
                continue
            try:
                if handle.request.progress.satisfies(handle.until) or handle.request.progress.done:
                    self.stop(handle)
            # an exception of `until`
            except BaseException as error:
                self.stop(handle, error)
        ending = [self.handles[index] for index in self._stopped]
        for handle in ending:
            self.twins.leave(handle.request)
            if handle in self.queue:
                self.queue.remove(handle)
        return tuple(handle.request for handle in ending)

    def _twins_of(self, view: StepView) -> tuple[tuple[Request, Request], ...]:
        """Waiting requests that draw the same samples as one in flight, which needs no slot."""
        handles = [self.handles[request.index] for request in view.active]
        groups = {handle.group for handle in handles} - {None}
        return tuple(
            (handle.request, leader)
            for handle in (self.queue if groups else ())
            if handle.group in groups and any(alike(handle, other) for other in handles)
            if (leader := self._leader(handle, view)) is not None
        )

    def _next(self, view: StepView, starts: Starts, room: PageRoom) -> Request | None:
        """Request whose sample gets the next slot, or that gets a place so that one may."""
        live: Counter[Hashable] = Counter()
        waiting: Counter[Hashable] = Counter()
        for request in view.active:
            if count := starts.live(request):
                live[self.owner_of(request)] += count
        for request in (*view.active, *view.reading, *(handle.request for handle in self.queue)):
            if count := starts.waiting(request):
                waiting[self.owner_of(request)] += count
        room.short = False
        for owner in self.turns.order(view.slots, live, waiting):
            found = self._next_of(owner, view, starts, room)
            # no sample may take the pages that this owner waits for
            if found is not None or (room.short and room.frees_enough):
                return found
        return None

    def _next_of(
        self, owner: Hashable, view: StepView, starts: Starts, room: PageRoom
    ) -> Request | None:
        """Does `_next` for one owner."""
        own = [r for r in view.active if starts.waiting(r) and self.owner_of(r) == owner]
        for request in own:
            most = self._together or -(-len(request.samples) // 4)
            if starts.live(request) < most and room.has(request):
                return request
        queued = next((h for h in self.queue if self.owner_of(h.request) == owner), None)
        if queued is not None and not view.reading and not room.short:
            request = queued.request
            if (
                self._leader(queued, view) is not None
                or pages_of(request, prompt=True) > view.pages
                or (view.groups < view.slots and room.has(request, prompt=True))
            ):
                return request
        if any(self.owner_of(request) == owner for request in view.reading):
            return None
        return next((request for request in own if room.has(request)), None)

    def _leader(self, handle: Handle, view: StepView) -> Request | None:
        """A request in flight of the same group; None if there is none."""
        if handle.group is None:
            return None
        return next((r for r in view.active if self.handles[r.index].group == handle.group), None)


def _too_long(request: Request, pages: int) -> ValueError:
    return ValueError(
        f"the prompt of {len(request.prompt)} tokens with "
        f"max_new_tokens={request.params.max_new_tokens} needs more than the {pages} pages "
        "available since the model was changed"
    )
