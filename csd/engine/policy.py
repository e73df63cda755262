"""The order of a call's requests: as they were given, or by the lengths of their past samples."""

from collections import deque
from itertools import chain

from csd.engine.call import RunSettings
from csd.engine.plan import Advanced, Begun, Ended, Event, Failed, Plan, Starts, StepView
from csd.engine.requests.history import longest_first
from csd.engine.requests.request import Request


class CallPolicy:
    """Decides for a call's requests; the first failure ends a call that does not return errors.

    together: most samples of a request in flight while other prompts wait, by default one: later
    samples draft from finished ones.
    """

    def __init__(self, requests: list[Request], settings: RunSettings, together: int | None):
        self._queue = deque(longest_first(requests))
        self._settings, self._together = settings, together or 1
        for request in requests:
            request.streams = settings.on_tokens is not None
        self._changed: dict[int, Request] = {}  # with samples that have ended, or a failure

    def plan(self, view: StepView) -> Plan | None:
        end = self._ended()
        if end:
            return Plan(end=end)
        starts, unread = Starts(view), bool(self._queue or view.reading)
        for request in view.active if starts.free else ():
            starts.add(request, self._together - starts.live(request))
        if unread:
            reads = starts.free and (view.reads_on or not view.reading)
            return Plan(
                start=tuple(starts.made), read=self._read(view, starts.free) if reads else ()
            )
        for request in view.active if starts.free else ():
            starts.add(request, starts.free)
        if not view.owned and not starts.made:
            return None
        return Plan(start=tuple(starts.made), ending=not any(map(starts.waiting, view.active)))

    def _read(self, view: StepView, free: int) -> tuple[Request, ...]:
        """Prompts to read, while their first samples have free slots; at least one."""
        read: list[Request] = []
        for request in chain(view.reading, self._queue):
            if read and free <= 0:
                break
            read.append(request)
            free -= min(len(request.samples), self._together)
        return tuple(read)

    def _ended(self) -> tuple[Request, ...]:
        """Requests whose samples have ended, or that `until` or a failure ends."""
        changed, self._changed = [*self._changed.values()], {}
        until = self._settings.until
        return tuple(
            r for r in changed if r.progress.error or r.progress.satisfies(until) or r.progress.done
        )

    def note(self, event: Event) -> None:
        match event:
            case Begun(request):
                self._queue.remove(request)
            case Advanced(request, live, tokens, text, sample):
                if sample is not None:
                    self._changed[request.index] = request
                if self._settings.on_tokens is not None:
                    self._settings.on_tokens(request, live, tokens, text)
            case Ended(error=BaseException() as error):
                raise error
            case Failed(request, error):
                if error is not request.progress.fault or not self._settings.returns_errors:
                    raise error
                request.progress.error = str(error) or type(error).__name__
                self._changed[request.index] = request
