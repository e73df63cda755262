"""A request in flight: new tokens of its samples as they are drawn, and its end."""

import asyncio
import hashlib
import math
import threading
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from csd.engine.requests.request import LiveSample, Request
from csd.engine.results.result import Sample, Samples, Until

# token ids at one position with their log-probabilities, likeliest first
Top = list[tuple[int, float]]
# an event loop, and the event that one of its readers awaits
Waker = tuple[asyncio.AbstractEventLoop, asyncio.Event]


@dataclass(slots=True)
class Piece:
    """New tokens and text of one sample since the caller's last read."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    top: list[Top] = field(default_factory=list)  # with top_logprobs, raw
    sample: Sample | None = None  # the whole sample, once it has ended


class Handle:
    """The engine's side of a request, from `submit` to its end; a `Reader` is its caller's.

    weights, fingerprint: of the weights that draw it, set at its admission; -1 and "" before.
    left: True once its reader is gone.
    """

    def __init__(
        self,
        request: Request,
        *,
        owner: str | None = None,
        client: str | None = None,
        until: Until | None = None,
        returns_errors: bool = False,
    ):
        self.request, self.owner, self.client, self.until = request, owner, client, until
        # True: samples that cannot continue are results; else the first one's error is raised
        self.returns_errors = returns_errors
        # requests with equal groups share a prompt's keys, values and graph
        self.group: tuple[str, bytes] | None = None
        if owner is not None and request.progress.scores is None and not request.history:
            self.group = owner, hashlib.blake2b(array("q", request.prompt).tobytes()).digest()
        self.weights, self.fingerprint = -1, ""
        self.admitted = False  # True once the request no longer waits
        self.error: BaseException | None = None
        # times of the monotonic clock: its submission, and its first token
        self.submitted, self.first_token = time.perf_counter(), math.nan
        self.began: dict[str, float] = {}  # the engine's seconds by phase at admission
        self.withdraw: Callable[[Handle], None] = lambda _: None
        self.leave: Callable[[Handle], None] = lambda _: None
        self.left = False
        # this request until its end, for a finalizer, which keeps what it holds
        self.in_flight = [self]
        self._changed = threading.Condition()
        self._pieces: dict[int, Piece] = {}
        self._given: set[int] = set()  # indices of samples whose end is in a piece
        self._result: Samples | None = None
        self.wakers: list[Waker] = []

    @property
    def done(self) -> bool:
        """True if the request has ended."""
        return self._result is not None

    # for readers

    def take(self) -> tuple[list[Piece], bool]:
        """Take the unread pieces; returns them, and True if the request has ended."""
        with self._changed:
            pieces, self._pieces = [*self._pieces.values()], {}
            return pieces, self.done

    def wait_for_news(self) -> None:
        """Wait for new pieces or the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._pieces or self.done)

    def wait_for_end(self, timeout: float | None) -> Samples | None:
        """Wait at most `timeout` seconds for the end; returns all samples, None before the end."""
        with self._changed:
            self._changed.wait_for(lambda: self.done, timeout)
            return self._result

    # for the engine's thread

    def push(self, live: LiveSample, tokens: list[int], text: str) -> None:
        """Add a step's tokens and text of a sample to its piece; `wake` notifies the readers."""
        # this request's sample, even if another request draws it
        sample = self.request.progress.finished.get(live.index)
        if not self.request.streams:
            if sample is not None:
                self.give(sample)
            return
        first = len(live.tokens) - len(tokens)
        with self._changed:
            piece = self._pieces.setdefault(live.index, Piece(live.index))
            piece.text += text
            piece.tokens += live.tokens[first:]
            piece.logprobs += live.logprobs[first:]
            piece.raw_logprobs += live.raw_logprobs[first:]
            # `likely` is appended before the tokens, which a stop string may cut
            piece.top += live.likely[first : len(live.tokens)]
            piece.sample = sample
            if sample is not None:
                self._given.add(live.index)

    def give(self, sample: Sample) -> None:
        """Add a sample that has ended to its piece; `wake` notifies the readers."""
        with self._changed:
            piece = self._pieces.setdefault(sample.index, Piece(sample.index))
            piece.text, piece.sample = sample.text or "", sample
            piece.tokens += sample.tokens
            piece.logprobs += sample.logprobs
            piece.raw_logprobs += sample.raw_logprobs
            piece.top += sample.top_logprobs
            self._given.add(sample.index)

    def end(self, error: BaseException | None = None, texts: bool = True) -> None:
        """End the request, with unfinished samples "cancelled", and wake its readers."""
        result = self.request.result(texts)
        with self._changed:
            for sample in result:
                if sample.index not in self._given:
                    self._pieces.setdefault(sample.index, Piece(sample.index)).sample = sample
            error = self.error or error
            if error is not None:
                self.error = _passable(error)
                # a class may forbid attributes, and its own code must not end the engine's thread
                with suppress(BaseException):
                    object.__setattr__(self.error, "samples", result)
            self._result = result
        self.in_flight.clear()
        # it has megabytes, and a caller may keep the error, whose frames refer to the request
        self.request.matcher = None
        self.wake()

    def wake(self) -> None:
        """Wake all readers, in threads and in event loops."""
        with self._changed:
            self._changed.notify_all()
            wakers = [*self.wakers]
        for loop, event in wakers:
            # a closed event loop has no readers
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(event.set)


# errors that a reader's generator, task, thread or event loop would take for its own end, and so
# end what has nothing to do with the request
_SIGNALS = (
    GeneratorExit,
    StopIteration,
    StopAsyncIteration,
    asyncio.CancelledError,
    KeyboardInterrupt,
    SystemExit,
)


def _passable(error: BaseException) -> BaseException:
    """The error, or a RuntimeError in place of a signal, which has it as its cause."""
    if not isinstance(error, _SIGNALS):
        return error
    passable = RuntimeError(f"the request was ended by a {type(error).__name__}")
    passable.__cause__ = error
    return passable
