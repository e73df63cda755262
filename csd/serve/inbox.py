"""Queue of requests, cancellations and changes of the model for the engine's thread.

`Counters` has the totals of an `AsyncEngine`; only one thread at a time writes each number.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from csd.engine.results.stats import Stats, tokens_per_step
from csd.serve.handle import Handle
from csd.serve.histogram import Histogram
from csd.serve.places import Places


@dataclass(slots=True)
class Counters:
    """Totals since the start, and current use of slots and pages."""

    steps: int = 0
    sample_steps: int = 0  # summed over the samples of each step
    tokens: int = 0
    prompt_tokens: int = 0  # tokens of prompts that were read
    cached_prompt_tokens: int = 0  # tokens of prompts that the prefix cache had
    shared_prompt_tokens: int = 0  # tokens of prompts whose pages another request already had
    shared_samples: int = 0  # samples not drawn, because another request draws them too
    requests: int = 0  # ended requests, including cancelled and failed ones
    cancelled: int = 0
    withdrawn: int = 0  # requests cancelled while in the inbox; not counted in `requests`
    failed: int = 0
    samples: int = 0
    nodes_proposed: int = 0
    accepted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Stats().accepted, 0))
    slots: int = 0  # slots that hold a sample
    groups: int = 0
    free_pages: int = 0
    cached_pages: int = 0  # of the free ones, pages of prompts that have ended
    pages: int = 0
    # seconds from a request's submission to its first token, and then per token of its longest
    # sample
    first_token: Histogram = field(default_factory=Histogram)
    per_token: Histogram = field(default_factory=Histogram)

    @property
    def tokens_per_step(self) -> float:
        """Tokens per sample and step."""
        return tokens_per_step(self.tokens, self.sample_steps)

    def ended(self, stats: Stats, samples: int, cancelled: bool, failed: bool) -> None:
        """Add an ended request to the totals; samples: number of samples that were finished."""
        self.requests += 1
        self.cancelled += cancelled
        self.failed += failed
        self.samples += samples
        self.nodes_proposed += stats.nodes_proposed
        for source, count in stats.accepted.items():
            self.accepted[source] = self.accepted.get(source, 0) + count


# a change, and the future that its caller waits for
Job = tuple[Callable[[], Any], Future]


class QueueFull(RuntimeError):
    """The limit of waiting requests is reached; the caller may try again later."""


class Closed(RuntimeError):
    """The engine accepts no more requests."""


class Inbox:
    """Queue that any thread writes and the engine's thread reads.

    limit: largest number of requests waiting for a slot.
    """

    def __init__(self, limit: int, counters: Counters):
        self._counters = counters
        self._places = Places(limit)  # of requests that have not been admitted, by client
        self.closed = False
        self.abandoned = False  # True: requests in flight end where they are
        self._reason = "the engine has been closed"
        self._changed = threading.Condition()
        self._arrived: deque[Handle] = deque()
        self._withdrawn: deque[Handle] = deque()
        self._jobs: deque[Job] = deque()

    def put(self, handle: Handle) -> None:
        """Queue a request. Raises QueueFull or Closed."""
        with self._changed:
            if self.closed:
                raise Closed(self._reason)
            if not self._places.allows(handle.client):
                held, limit = self._places.held, self._places.count
                raise QueueFull(
                    f"the queue has max_queue={limit} waiting requests: try again later"
                    if self._places.full
                    else f"the queue of max_queue={limit} requests has {held}, and this client's "
                    "share of it is full: try again later"
                )
            self._places.take(handle.client)
            handle.withdraw, handle.leave = self._withdraw, self._leave
            self._arrived.append(handle)
            self._changed.notify_all()

    def _withdraw(self, handle: Handle) -> None:
        with self._changed:
            here = handle in self._arrived
            if here:
                self._arrived.remove(handle)
                self._places.give(handle.client)
                self._counters.withdrawn += 1
            else:
                self._withdrawn.append(handle)
            self._changed.notify_all()
        if here:
            handle.end()

    def _leave(self, handle: Handle) -> None:
        """Cancel a request whose reader was collected, from wherever that happens.

        It takes no lock, since a collection may interrupt a thread that holds one.
        """
        handle.left = True
        self._withdrawn.append(handle)

    def ask(self, job: Callable[[], Any]) -> Future:
        """Queue `job` for the engine's thread, which calls it once nothing is in flight.

        Returns the future of its result. Raises Closed.
        """
        future: Future = Future()
        with self._changed:
            if self.closed:
                raise Closed(self._reason)
            self._jobs.append((job, future))
            self._changed.notify_all()
        return future

    def close(self, abandon: bool) -> None:
        with self._changed:
            self.closed = True
            self.abandoned = self.abandoned or abandon
            self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """Number of requests that have not been admitted."""
        return self._places.held

    # for the engine's thread

    @property
    def has_requests(self) -> bool:
        return bool(self._arrived)

    @property
    def has_jobs(self) -> bool:
        return bool(self._jobs)

    def take(self) -> list[Handle]:
        """Take the requests that have arrived, in order of arrival."""
        if not self._arrived:
            return []
        with self._changed:
            handles = [*self._arrived]
            self._arrived.clear()
            return handles

    def withdrawn(self) -> list[Handle]:
        """Take the cancelled requests, some of which may already have ended."""
        return [self._withdrawn.popleft() for _ in range(len(self._withdrawn))]

    def end(self, error: BaseException | None) -> list[Handle]:
        """Close when the thread ends, with its error; changes of the model get it too.

        Returns the requests that have not been taken.
        """
        with self._changed:
            self.closed = True
            if error is not None:
                self._reason = str(error)
            jobs, self._jobs = [*self._jobs], deque()
            handles, self._arrived = [*self._arrived], deque()
        for _, future in jobs:
            future.set_exception(Closed(self._reason))
        return handles

    def admitted(self, handle: Handle) -> None:
        """Count a request as no longer waiting."""
        with self._changed:
            self._places.give(handle.client)

    def jobs(self) -> list[Job]:
        with self._changed:
            jobs = [*self._jobs]
            self._jobs.clear()
            return jobs

    def wait(self) -> bool:
        """Block until there are requests or jobs; False if the inbox is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived or self._jobs or self.closed)
            return bool(self._arrived or self._jobs)
