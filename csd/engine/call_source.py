"""Requests of one call, as the scheduler's source, until all end: in order, or by past lengths."""

from collections.abc import Iterator
from typing import Any
from weakref import proxy

from csd.engine.call import RunSettings
from csd.engine.requests.history import longest_first
from csd.engine.requests.request import Request
from csd.engine.results.result import Sample
from csd.engine.step.prefill import Prefill, reads_several, units_of


class CallSource:
    """A call's requests, of which the first failure ends the call.

    together: most samples of a request in flight while other prompts wait, by default one: later
    samples draft from finished ones.
    """

    def __init__(self, requests: list[Request], settings: RunSettings, together: int | None):
        self._requests, self._settings, self._together = requests, settings, together or 1
        for request in requests:
            request.until, request.on_tokens = settings.until, settings.on_tokens
            request.streams = settings.on_tokens is not None

    def begin(self, scheduler: Any) -> None:
        # weak, so that a run's memory is freed at its end and not by the garbage collector
        self._scheduler, self._slots = proxy(scheduler), proxy(scheduler.slots)
        self._slots.queue.extend(longest_first(self._requests))

    def fill(self) -> int:
        with self._scheduler.threads.chosen():
            self._slots.refill()
        return self._slots.owned

    def next_request(self) -> Request | None:
        slots = self._slots
        waiting = [request for request in slots.active if request.waiting]
        for request in waiting:
            if len(request.live) < self._together:
                return request
        if slots.queue or slots.ahead or slots.prefill:
            return slots.admit()
        return waiting[0] if waiting else None

    def read_along(self, rows: int) -> Iterator[Prefill]:
        """Begins further prompts too, while their first samples have free slots."""
        slots = self._slots
        if not reads_several(slots.step):
            return
        assert slots.prefill is not None
        for prefill in slots.ahead:
            if 0 < prefill.chunk <= rows:
                rows -= prefill.chunk
                yield prefill
        begun = [slots.prefill.request, *(prefill.request for prefill in slots.ahead)]
        free = slots.owners.count(None) - sum(map(self._slots_of, begun))
        while slots.queue and free > 0 and self._begins_along(slots.queue[0], rows):
            prefill = slots.begin_prefill()
            slots.ahead.append(prefill)
            free -= self._slots_of(prefill.request)
            if prefill.chunk:
                rows -= prefill.chunk
                yield prefill

    def _begins_along(self, request: Request, rows: int) -> bool:
        """True if a request's first chunk has at most `rows` tokens, so another's pass reads it,
        and no prompt that is being read will have more of its beginning."""
        slots = self._slots
        units, index = units_of(slots.step, request, slots.prefill_chunk), slots.prefix_index
        if index is not None and request.units and len(units) < len(request.units):
            missing = request.units[len(units)]
            reading = [slots.prefill] if slots.prefill else []
            if any(prefill.will_keep(missing) for prefill in (*reading, *slots.ahead)):
                return False
        left = len(request.prompt) - 1 - len(units) * (index.tokens if index else 0)
        return min(slots.prefill_chunk, left) <= rows

    def _slots_of(self, request: Request) -> int:
        """Number of slots that the request's first samples get."""
        return min(len(request.samples), self._together)

    def ending(self) -> bool:
        return not self._slots.any_waits

    def advanced(self, request: Request, new: int) -> None:
        pass

    def failed(
        self, request: Request, error: BaseException, index: int | None = None
    ) -> Iterator[tuple[Request, Sample]]:
        if error is not request.fault or not self._settings.returns_errors:
            raise error
        request.error = str(error) or type(error).__name__
        return self._scheduler.cancel(request)

    def leave(self, request: Request) -> None:
        pass
