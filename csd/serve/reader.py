"""A caller's side of a request: its pieces as they are drawn, and its result."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, aclosing

from csd.engine.results.logprobs import PromptScores
from csd.engine.results.result import Samples
from csd.serve.handle import Handle, Piece, Waker


class Reader:
    """A request of an `AsyncEngine`, for any thread or event loop.

    Iteration yields a `Piece` for each sample with new tokens, at the reader's pace: unread tokens
    accumulate in one piece per sample, and the engine never waits for a reader. `result` (or
    `await wait()`) returns all samples at the end. Both raise the error that ended this request,
    with the attribute `samples`.

    A request whose last reader leaves before the end is cancelled: if its loop is left, if `result`
    or `wait` times out or is cancelled, and if no reference to this object remains. With
    `detached=True` it is drawn to its end.
    """

    def __init__(self, handle: Handle, detached: bool = False):
        self._handle, self._detached = handle, detached
        self.request, self.owner = handle.request, handle.owner
        self.seed, self.prompt_ids = handle.request.seed, handle.request.prompt
        self._readers: set[object] = set()  # one mark per loop or wait in progress
        if not detached:
            # the process ends without waiting for requests
            weakref.finalize(self, _leave, handle.in_flight).atexit = False

    @property
    def scores(self) -> PromptScores | None:
        """Log-probabilities of the prompt's own tokens, if requested."""
        return self.request.progress.scores

    @property
    def weights(self) -> int:
        """Version of the weights that draw it, set at its admission; -1 before."""
        return self._handle.weights

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the weights that draw it, set at its admission; "" before."""
        return self._handle.fingerprint

    @property
    def done(self) -> bool:
        """True if the request has ended."""
        return self._handle.done

    @property
    def error(self) -> BaseException | None:
        """The error that ended the request."""
        return self._handle.error

    def cancel(self) -> None:
        """End the request's samples where they are; unfinished ones are "cancelled"."""
        if not self.done:
            self._handle.withdraw(self._handle)

    def take(self) -> tuple[list[Piece], bool]:
        """Take the unread pieces; returns them, and True if the request has ended."""
        return self._handle.take()

    def __iter__(self) -> Iterator[Piece]:
        with self.reading():
            while True:
                self._handle.wait_for_news()
                pieces, ended = self.take()
                yield from pieces
                if ended:
                    self.raise_error()
                    return

    async def __aiter__(self) -> AsyncIterator[Piece]:
        async with aclosing(news([self])) as updates:
            async for _, pieces in updates:
                for piece in pieces:
                    yield piece

    def result(self, timeout: float | None = None) -> Samples:
        """Wait for the end; returns all samples. Raises TimeoutError after `timeout` seconds."""
        with self.reading():
            result = self._handle.wait_for_end(timeout)
            if result is None:
                cancelled = " and is cancelled: submit it with detached=True to wait again"
                raise TimeoutError(
                    f"the request has not finished within {timeout} seconds"
                    + ("" if self._detached else cancelled)
                )
        self.raise_error()
        return result

    async def wait(self) -> Samples:
        """`result` without blocking the event loop."""
        async with aclosing(news([self])) as updates:
            async for _ in updates:
                pass
        return self.result()

    def raise_error(self) -> None:
        """Raise the error that ended this request, if there is one."""
        if self.error is not None:
            raise self.error

    def reading(self, waker: Waker | None = None) -> ExitStack:
        """Context of one reader, from this call on. If none is left before the end, the request is
        cancelled.

        waker: notified of new pieces meanwhile.
        """
        # no @contextmanager: contextlib sets attributes of the error, which its class may forbid
        mark, stack = object(), ExitStack()
        self._readers.add(mark)
        stack.callback(self._end, mark)
        if waker is not None:
            self._handle.wakers.append(waker)
            stack.callback(self._handle.wakers.remove, waker)
        return stack

    def _end(self, mark: object) -> None:
        self._readers.discard(mark)
        if not self._readers and not self._detached:
            self.cancel()


def _leave(in_flight: list[Handle]) -> None:
    for handle in [*in_flight]:
        handle.leave(handle)


async def news(readers: Sequence[Reader]) -> AsyncGenerator[tuple[Reader, list[Piece]], None]:
    """Yields (reader, new pieces) of several requests until all have ended.

    Raises the error that ended one of them.
    """
    waker = asyncio.get_running_loop(), asyncio.Event()
    left = [*readers]
    with ExitStack() as stack:
        for reader in readers:
            stack.enter_context(reader.reading(waker))
        while left:
            waker[1].clear()
            waits = True
            for reader in [*left]:
                pieces, ended = reader.take()
                if pieces:
                    waits = False
                    yield reader, pieces
                if ended:
                    left.remove(reader)
                    reader.raise_error()
            if waits and left:
                await waker[1].wait()
