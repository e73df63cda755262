"""Threads that read clients' bodies: JSON, templates, tokens and grammars.

A thread that computes cannot be ended, so the work itself is bounded by the sizes in `Limits`. A
client has a share of the threads, whatever it sends and whether or not it stays, and clients take
turns. Of one client, small bodies come first.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from csd.serve.http.errors import Refused

T = TypeVar("T")


@dataclass(order=True, slots=True)
class _Turn:
    """A body that waits for a thread."""

    size: int
    serial: int
    begun: asyncio.Event = field(compare=False)


class Readers:
    """Threads for the bodies of all clients, used from one event loop.

    share: threads that one client may use at once. seconds: limit of waiting for a thread, and of
        the work.
    """

    def __init__(self, threads: int, share: int, seconds: float):
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="csd.Readers")
        self._free, self._share, self._seconds = threads, share, seconds
        self._serial = count()
        self._waiting: dict[str, list[_Turn]] = {}  # heaps, by client
        self._busy: dict[str, int] = {}  # threads, by client
        self._next: deque[str] = deque()  # clients that wait, in turn
        self.open = 0  # bodies being read, or waiting for it

    async def run(
        self, client: str, size: int, work: Callable[[], T], undo: Callable[[T], Any] | None = None
    ) -> T:
        """Returns `work()`, called in a thread.

        size: of the body. undo: called with the result if the caller no longer waits for it.

        Raises Refused if there is no result in time.
        """
        loop = asyncio.get_running_loop()
        turn = _Turn(size, next(self._serial), asyncio.Event())
        future: Future[T] | None = None

        def ended(done: Future[T]) -> None:
            # the loop may have ended before the work
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._end, client)

        def undone(done: Future[T]) -> None:
            if undo is not None and not done.cancelled() and done.exception() is None:
                undo(done.result())

        self.open += 1
        try:
            if client not in self._waiting:
                self._next.append(client)
            heapq.heappush(self._waiting.setdefault(client, []), turn)
            self._begin()
            async with asyncio.timeout(self._seconds):
                await turn.begun.wait()
            future = self._pool.submit(work)
            future.add_done_callback(ended)
            async with asyncio.timeout(self._seconds):
                return await asyncio.shield(asyncio.wrap_future(future))
        except BaseException as error:
            if future is not None:
                future.add_done_callback(undone)
            elif turn.begun.is_set():
                self._end(client)
            else:
                self._leave(client, turn)
            if isinstance(error, TimeoutError) and (future is None or not future.done()):
                raise Refused(
                    f"the request was not read within {self._seconds:g} seconds: send fewer or "
                    "smaller requests at once",
                    status=503,
                    code="reading_too_long",
                ) from error
            raise
        finally:
            self.open -= 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        """Give free threads to the clients that wait, in turn."""
        for _ in range(len(self._next)):
            if not self._free:
                return
            client = self._next.popleft()
            heap = self._waiting[client]
            if self._busy.get(client, 0) < self._share:
                self._free -= 1
                self._busy[client] = self._busy.get(client, 0) + 1
                heapq.heappop(heap).begun.set()
            if heap:
                self._next.append(client)
            else:
                del self._waiting[client]

    def _leave(self, client: str, turn: _Turn) -> None:
        heap = self._waiting[client]
        heap.remove(turn)
        heapq.heapify(heap)
        if not heap:
            del self._waiting[client]
            self._next.remove(client)

    def _end(self, client: str) -> None:
        self._free += 1
        self._busy[client] -= 1
        if not self._busy[client]:
            del self._busy[client]
        self._begin()
