"""Plain values by which a step is composed: the state, the plan, and the events that follow.

Slots make the view and apply the plan (`slots.py`); a policy makes the plan and gets the events.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from csd.engine.requests.request import LiveSample, Request
from csd.engine.results.result import Sample


@dataclass(frozen=True, slots=True)
class StepView:
    """Slots, pages and prompts between two steps."""

    slots: int  # in all
    free: tuple[int, ...] = ()  # slots without a sample, ascending
    active: tuple[Request, ...] = ()  # in flight, in the order in which their prompts were read
    reading: tuple[Request, ...] = ()  # whose prompts are being read, in the order of their begin
    reads_on: bool = True  # whether the first of these may go on before the next step
    pages: int = 0  # in all
    free_pages: int = 0
    held_pages: int = 0  # of samples in flight
    cached_pages: int = 0  # of the free ones, pages of prompts that have ended
    groups: int = 0  # prompts in flight, equal ones that share pages counted once
    reach: int | None = None  # most keys that a row attends to, which limits a sample's pages
    steps: int = 0  # steps of the run so far
    seconds: Mapping[str, float] = field(default_factory=dict)  # of the run so far, by phase

    @property
    def owned(self) -> int:
        """Number of slots that hold samples."""
        return self.slots - len(self.free)


@dataclass(frozen=True, slots=True)
class Start:
    """A slot gets a request's sample `index`."""

    slot: int
    request: Request
    index: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Acts that come next, in the order of the fields.

    A step follows a plan that only starts samples, all without an error. Others may leave more to
    do before it: another plan follows.
    """

    end: tuple[Request, ...] = ()  # unfinished samples are cancelled
    # a request gets the place of another one with the same prompt
    join: tuple[tuple[Request, Request], ...] = ()
    start: tuple[Start, ...] = ()
    # the first prompt is read as far as a step may wait; chunks of the others share its passes
    # where they fit, and those that have not begun do so in this order
    read: tuple[Request, ...] = ()
    ending: bool = False  # whether no sample waits, and those in flight are one job


@dataclass(frozen=True, slots=True)
class Begun:
    """A request has its place: its prompt is about to be read, or joins one that was."""

    request: Request
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Advanced:
    """A step has given a sample new tokens, whose text is final up to `text`."""

    request: Request
    live: LiveSample
    tokens: list[int]
    text: str
    sample: Sample | None = None  # the whole sample, if it has ended


@dataclass(frozen=True, slots=True)
class Failed:
    """A request cannot go on, by an error of its sample `index`, or of its beginning."""

    request: Request
    error: BaseException
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A request has ended, as planned.

    rest: samples that were unfinished. error: of their texts, which they are then without.
    """

    request: Request
    rest: list[Sample]
    error: BaseException | None = None


Event = Begun | Advanced | Failed | Ended


class StepPolicy(Protocol):
    """Decides which requests of a run are read, started and ended; it holds no slots.

    `CallPolicy` has the requests of a call, the server's `ServedRequests` those that arrive.
    """

    def plan(self, view: StepView) -> Plan | None:
        """Returns the next plan; None ends the run."""

    def note(self, event: Event) -> None:
        """Take in an event of a plan or a step. Raises an error that ends the run."""


class Starts:
    """Samples that a plan starts, in the free slots of a view."""

    def __init__(self, view: StepView):
        self._free = [*reversed(view.free)]
        self._count: Counter[int] = Counter()  # samples started here, by request
        self.made: list[Start] = []

    @property
    def free(self) -> int:
        """Number of slots that are left."""
        return len(self._free)

    def waiting(self, request: Request) -> int:
        """Number of a request's samples that wait for a slot."""
        return len(request.progress.waiting) - self._count[request.index]

    def live(self, request: Request) -> int:
        """Number of a request's samples in flight."""
        return len(request.progress.live) + self._count[request.index]

    def add(self, request: Request, most: int = 1) -> None:
        """Start the next samples of a request, at most `most`, while slots are left."""
        for _ in range(min(most, self.waiting(request), self.free)):
            index = request.progress.waiting[self._count[request.index]]
            self.made.append(Start(self._free.pop(), request, index))
            self._count[request.index] += 1
