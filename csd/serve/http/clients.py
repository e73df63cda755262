"""Access of clients: API keys, size and time of a body, threads that read it, time without reading.

`Readers` are the threads for JSON, templates, tokens and grammars. A thread that computes cannot be
ended, so the work itself is bounded by the sizes in `Limits` (`checks.py`). A client has a share of
the threads, whatever it sends and whether or not it stays, and clients take turns. Of one client,
small bodies come first.
"""

import asyncio
import hashlib
import heapq
import hmac
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from csd.serve.http.api.events import event_of
from csd.serve.http.api.response import HttpAnswer
from csd.serve.http.checks import Limits
from csd.serve.http.errors import Refused
from csd.serve.http.json_parts import loads

T = TypeVar("T")


def owner_of(key: bytes) -> str:
    """Owner of the requests with an API key."""
    return hashlib.sha256(key).hexdigest()


class Clients:
    """Owners of requests, by API key.

    keys: the accepted keys; without any, all requests are accepted. shares: True makes equal
        prompts of different requests one group if there are no keys. window: seconds within which
        equal prompts without a seed of one address are one group; 0: never.
    """

    def __init__(self, keys: Sequence[str], shares: bool, window: float = 0.0):
        check_keys("keys", keys)
        self._window = window
        self._groups: dict[str, tuple[float, str]] = {}  # end and owner of each client's window
        self._lock = threading.Lock()
        self._keys, self._shares = [key.encode() for key in keys], shares
        self.open = not keys

    def owner(self, request: Request) -> str | None:
        """Owner of a request, which may share with its other requests; None: it shares with none.

        Raises Refused for a missing or wrong key.
        """
        if not self._keys:
            return "anyone" if self._shares else None
        return owner_of(self._key(request))

    def group(self, client: str) -> str | None:
        """Owner of a client's requests without a key and a seed that arrive in one window."""
        if not self._window:
            return None
        now = time.monotonic()
        with self._lock:
            self._groups = {name: kept for name, kept in self._groups.items() if kept[0] > now}
            new = now + self._window, secrets.token_hex(8)
            return self._groups.setdefault(client, new)[1]

    def client(self, request: Request) -> str:
        """Client whose shares a request uses: its key's digest, or its address."""
        if self._keys:
            return owner_of(self._key(request))
        return request.client.host if request.client is not None else ""

    def sharing(self, client: str) -> str | None:
        """The client, if others may come whose places it must leave; None with one key."""
        return None if len(self._keys) == 1 else client

    def administrator(self, request: Request) -> None:
        """Raises Refused if there are keys and the request does not have the first one."""
        if self._keys and not hmac.compare_digest(self._key(request), self._keys[0]):
            raise Refused("this path requires the first --api-key", status=403, code="not_allowed")

    def _key(self, request: Request) -> bytes:
        kind, _, credentials = request.headers.get("authorization", "").partition(" ")
        key = credentials.strip().encode()
        # all keys are compared, so that the time does not depend on which one matches
        matches = [hmac.compare_digest(key, one) for one in self._keys]
        if kind.lower() != "bearer" or not key or not any(matches):
            raise Refused("the API key is missing or wrong", status=401, code="invalid_api_key")
        return key


def check_keys(name: str, keys: Sequence[str]) -> None:
    """Raises TypeError or ValueError for a key that a header cannot have, or that is empty."""
    # a string would be keys of one character
    if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
        raise TypeError(f"{name} must be a list of strings, got a {type(keys).__name__}")
    for key in keys:
        if not key or not all("!" <= letter <= "~" for letter in key):
            raise ValueError(
                f"{name} must be visible ASCII characters without spaces, got a key of "
                f"{len(key)} characters with others"
                if key.strip()
                else f"{name} must not be empty or blank: leave it out to serve without keys"
            )


class Shares:
    """Bytes that each client holds at once, limited to `limit`."""

    def __init__(self, what: str, limit: int):
        self._what, self._limit = what, limit
        self._held: dict[str, int] = {}
        self._lock = threading.Lock()

    def take(self, client: str, size: int) -> None:
        """Raises Refused if the client would hold more than its limit."""
        with self._lock:
            held = self._held.get(client, 0) + size
            if held > self._limit:
                raise Refused(
                    f"the {self._what} of this client's requests must have at most {self._limit} "
                    "bytes together: wait for earlier ones",
                    status=429,
                    code="too_many_bytes",
                )
            self._held[client] = held

    def give(self, client: str, size: int) -> None:
        with self._lock:
            self._held[client] -= size
            if not self._held[client]:
                del self._held[client]


async def receive_body(request: Request, limits: Limits, take: Callable[[int], Any]) -> bytes:
    """Returns the bytes of a body, after `take` of each part's size. Raises Refused."""
    body, limit = bytearray(), limits.body

    def check(size: int) -> None:
        if size > limit:
            about = f"the body must have at most {limit} bytes"
            raise Refused(about, status=413, code="body_too_large")

    async def read() -> None:
        async for chunk in request.stream():
            check(len(body) + len(chunk))
            take(len(chunk))
            body.extend(chunk)

    # before a client that asks first (Expect: 100-continue) sends it
    length = request.headers.get("content-length", "")
    check(int(length) if length.isdecimal() else 0)
    try:
        await asyncio.wait_for(read(), limits.body_seconds)
    except TimeoutError as error:
        about = f"the body was not received within {limits.body_seconds} seconds"
        raise Refused(about, status=408) from error
    return bytes(body)


def parse_body(data: bytes) -> dict[str, Any]:
    """Returns the JSON object in a body. Raises Refused."""
    try:
        body = loads(data)
    # bytes that are no text or no JSON, or nested too deeply
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body must be JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    return body


async def gone(receive: Receive) -> None:
    """Wait until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(
    receive: Receive, result: Coroutine[Any, Any, T], end: Callable[[], Any] = lambda: None
) -> T:
    """Returns the result of a coroutine, which is cancelled when the client disconnects.

    end: called once the result is there or the client has left. Raises ClientDisconnect in the
    second case.
    """
    work = asyncio.ensure_future(result)
    leaving = asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        end()
        for task in (work, leaving):
            task.cancel()
        await asyncio.gather(work, leaving, return_exceptions=True)


async def results_of(answer: HttpAnswer) -> list[Any]:
    """Returns the results of all prompts. Raises Refused for the error that ended one."""
    asked = answer.asked
    try:
        results = [await handle.wait() for handle in asked.handles]
        asked.raise_error()
    except Exception as error:
        raise answer.refused(error) from error
    if any(sample.finish_reason == "cancelled" for result in results for sample in result):
        raise Refused("the server is shutting down", status=503, code="shutting_down")
    return results


class EventStream(Response):
    """Events of a request. A client that leaves, or does not read for `seconds`, ends the request.

    end: called once the response has ended.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        answer: HttpAnswer,
        seconds: float,
        end: Callable[[], Any],
    ):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.events, self.answer, self.seconds, self.end = events, answer, seconds, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # a TimeoutError is a slow reader's, whose connection is closed after this
        with suppress(ClientDisconnect, TimeoutError):
            try:
                await unless_gone(receive, self._send(send), self.answer.asked.cancel)
            finally:
                self.end()

    async def _send(self, send: Send) -> None:
        async def body(data: bytes, more: bool = True) -> None:
            message = {"type": "http.response.body", "body": data, "more_body": more}
            # a TimeoutError here closes the connection
            await asyncio.wait_for(send(message), self.seconds)

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for data in self.events:
                await body(data)
        except TimeoutError:
            raise
        except Exception as error:
            await body(event_of(self.answer.refused(error).body()))
        await body(b"", more=False)


class WholeAnswer(Response):
    """JSON of an answer. end: called once it has been sent, or its client has left."""

    media_type = "application/json"

    def __init__(self, content: bytes, end: Callable[[], Any]):
        super().__init__(content)
        self.end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = "http.response.body"
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": kind, "body": self.body, "more_body": True})
            # a server waits before this one until the client has read most of the other
            await send({"type": kind, "body": b"", "more_body": False})
        finally:
            self.end()


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
        limit = asyncio.timeout(self._seconds)

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
            async with limit:
                await turn.begun.wait()
            future = self._pool.submit(work)
            future.add_done_callback(ended)
            limit = asyncio.timeout(self._seconds)
            async with limit:
                return await asyncio.shield(asyncio.wrap_future(future))
        except BaseException as error:
            if future is not None:
                future.add_done_callback(undone)
            elif turn.begun.is_set():
                self._end(client)
            else:
                self._leave(client, turn)
            # the work may end, or raise a TimeoutError of its own, at the same time
            if isinstance(error, TimeoutError) and limit.expired():
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
