"""Samples that several requests of one owner need: one request draws each, the others receive it.

A sample is a function of (prompt, seed, index, parameters), so requests in which these are equal
need the same sample. If the request that draws it is ended first, another continues the sample.
"""

from copy import copy

from csd.engine.requests.request import LiveSample, Request
from csd.engine.results.result import Sample
from csd.serve.handle import Handle


class Twins:
    """Requests in flight that wait for samples of another request."""

    def __init__(self) -> None:
        # keys: index of the request that draws a sample, index of the sample
        self._waiting: dict[tuple[int, int], list[Request]] = {}
        self._texts: dict[tuple[int, int], str] = {}  # texts so far of samples in flight

    def join(self, handle: Handle, others: list[Handle]) -> list[Sample]:
        """Let `handle` wait for samples that `others` draw; returns samples that have ended.

        others: requests that have joined already, so that none waits for a request that waits.
        """
        request, ended = handle.request, []
        for other in (h.request for h in others if alike(h, handle)):
            for i in [i for i in request.progress.waiting if i in other.samples]:
                sample = other.progress.finished.get(i)
                live = other.progress.live.get(i)
                if sample is not None and sample.finish_reason != "cancelled":
                    request.progress.finished[i] = sample
                    ended.append(sample)
                    _copy_error(other, request, i)
                elif live is not None or i in other.progress.waiting:
                    self._waiting.setdefault((other.index, i), []).append(request)
                    request.progress.awaited.add(i)
                    if live is not None and live.tokens:
                        text = self._texts.get((other.index, i), "")
                        handle.push(live, live.tokens, text)
                else:
                    continue
                request.progress.waiting.remove(i)
        return ended

    def of(self, request: Request, index: int) -> list[Request]:
        """Requests that wait for a sample that `request` draws."""
        return self._waiting.get((request.index, index), [])

    def keep_text(self, live: LiveSample, text: str) -> None:
        """Store new text of a sample for requests that join later."""
        key = live.request.index, live.index
        self._texts[key] = self._texts.get(key, "") + text

    def end(self, request: Request, index: int) -> list[Request]:
        """Give an ended sample to the requests that waited for it; returns these."""
        self._texts.pop((request.index, index), None)
        waiting = self._waiting.pop((request.index, index), [])
        for other in waiting:
            other.progress.finished[index] = request.progress.finished[index]
            _copy_error(request, other, index)
            other.progress.awaited.discard(index)
        return waiting

    def leave(self, request: Request) -> None:
        """Remove a request that is ended: waiting requests take over the samples it draws."""
        for others in self._waiting.values():
            if request in others:
                others.remove(request)
        request.progress.awaited.clear()
        for key in [key for key in self._waiting if key[0] == request.index]:
            others, i = self._waiting.pop(key), key[1]
            if not others:
                continue
            heir, live = others.pop(0), request.progress.live.pop(i, None)
            heir.progress.awaited.discard(i)
            if live is None:
                # a sample whose assignment to a slot has failed does not wait any more
                if i in request.progress.waiting:
                    request.progress.waiting.remove(i)
                heir.progress.waiting.append(i)
            else:
                # both requests keep the tokens drawn so far
                request.progress.finished[i] = Sample(
                    i, None, [*live.tokens], [*live.logprobs], [*live.raw_logprobs], "cancelled"
                )
                live.request = heir
                heir.progress.live[i] = live
            if others:
                self._waiting[heir.index, i] = others
            if key in self._texts:
                self._texts[heir.index, i] = self._texts.pop(key)
        for key in [key for key in self._texts if key[0] == request.index]:
            del self._texts[key]


def _copy_error(of: Request, to: Request, index: int) -> None:
    """Give the error of a sample to another request, as an object of its own: readers raise it."""
    if index in of.progress.errors:
        to.progress.errors[index] = copy(of.progress.errors[index])


def alike(a: Handle, b: Handle) -> bool:
    """True if both requests have the same samples, streaming and measures, in one group."""
    if a is b or a.group is None or a.group != b.group:
        return False
    one, other = a.request, b.request
    names = ("seed", "params", "measures", "streams")
    return all(getattr(one, name) == getattr(other, name) for name in names)
