"""Access and limits of clients: API keys, size and time of a body, time without reading."""

import asyncio
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from csd.integrations.serve.asked import Asked
from csd.integrations.serve.errors import Refused
from csd.integrations.serve.events import error_event


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request, and of all requests together."""

    body: int = 8 << 20  # bytes
    choices: int = 128  # prompts times n
    requests: int = 512  # answered at the same time
    body_seconds: float = 30.0  # to receive a body
    send_seconds: float = 60.0  # for a reader to take each event


class Clients:
    """Owners of requests, by API key.

    keys: the accepted keys; without any, all requests are accepted. shares: True makes equal
        prompts of different requests one group if there are no keys.
    """

    def __init__(self, keys: Sequence[str], shares: bool):
        self._keys, self._shares = [key.encode() for key in keys], shares

    def owner(self, request: Request) -> str | None:
        """Owner of a request, which may share with its other requests; None: it shares with none.

        Raises Refused for a missing or wrong key.
        """
        if not self._keys:
            return "anyone" if self._shares else None
        return hashlib.sha256(self._key(request)).hexdigest()

    def administrator(self, request: Request) -> None:
        """Raises Refused if there are keys and the request does not have the first one."""
        if self._keys and not hmac.compare_digest(self._key(request), self._keys[0]):
            raise Refused("this path requires the first --api-key", status=403, code="not_allowed")

    def _key(self, request: Request) -> bytes:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        found = given.strip().encode() if kind.lower() == "bearer" else b""
        # all keys are compared, so that the time does not depend on which one matches
        matches = [hmac.compare_digest(found, key) for key in self._keys]
        if not any(matches):
            raise Refused("the API key is missing or wrong", status=401, code="invalid_api_key")
        return found


async def read_body(request: Request, limits: Limits) -> dict[str, Any]:
    """Returns the JSON object in the body. Raises Refused."""
    found = bytearray()

    async def read() -> None:
        async for chunk in request.stream():
            found.extend(chunk)
            if len(found) > limits.body:
                raise Refused(
                    f"the body must have at most {limits.body} bytes", status=413,
                    code="body_too_large",
                )  # fmt: skip

    try:
        await asyncio.wait_for(read(), limits.body_seconds)
    except TimeoutError as error:
        raise Refused(
            f"the body was not received within {limits.body_seconds} seconds", status=408
        ) from error
    try:
        body = json.loads(found)
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


async def unless_gone(receive: Receive, asked: Asked) -> list[Any]:
    """Returns the results of all prompts, or cancels the prompts when the client disconnects.

    Raises ClientDisconnect in that case, else the error that ended a prompt.
    """
    work = asyncio.ensure_future(_results(asked))
    leaving = asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        # no effect on prompts that have ended
        asked.cancel()
        for task in (work, leaving):
            task.cancel()
        await asyncio.gather(work, leaving, return_exceptions=True)


async def _results(asked: Asked) -> list[Any]:
    results = [await handle.wait() for handle in asked.handles]
    if any(sample.finish_reason == "cancelled" for result in results for sample in result):
        raise Refused("the server is shutting down", status=503, code="shutting_down")
    asked.raise_error()
    return results


class EventStream(Response):
    """Events of a request. A client that leaves, or does not read for `seconds`, ends the request.

    end: called once the response has ended.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], asked: Asked, seconds: float, end: Callable[[], Any]
    ):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.events, self.asked, self.seconds, self.end = events, asked, seconds, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.asked.cancel()
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            self.end()
        error = None if sending.cancelled() else sending.exception()
        # a TimeoutError is a slow reader's, whose connection is closed after this
        if error is not None and not isinstance(error, TimeoutError):
            raise error

    async def _send(self, send: Send) -> None:
        async def body(data: bytes, more: bool = True) -> None:
            # a TimeoutError here closes the connection
            await asyncio.wait_for(
                send({"type": "http.response.body", "body": data, "more_body": more}),
                self.seconds,
            )

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for data in self.events:
                await body(data)
        except TimeoutError:
            raise
        except Exception as error:
            await body(error_event(error))
        await body(b"", more=False)
