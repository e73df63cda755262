"""Access and limits of clients: API keys, size and time of a body, time without reading.

The sizes of a request's values are checked before anything is computed from them (`check_sizes`).
"""

import asyncio
import hashlib
import hmac
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from csd.serve.http.errors import Refused
from csd.serve.http.events import error_event
from csd.serve.http.json_parts import loads
from csd.serve.http.request import Asked
from csd.serve.http.response import Answer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request, and of all requests together."""

    body: int = 2 << 20  # bytes
    choices: int = 128  # prompts times n
    requests: int = 1024  # answered at the same time
    # probabilities of likely tokens in one answer, which takes some 500 bytes for each
    likely: int = 1 << 21
    body_seconds: float = 30.0  # to receive a body
    turns: int = 1024  # messages of a chat
    template: int = 1 << 20  # characters of messages, tools and chat_template_kwargs
    grammar: int = 1 << 16  # characters of a schema, regex or grammar, or of a list of strings
    entries: int = 4096  # values within a schema
    strings: int = 1024  # strings in a list such as stop or bad_words
    ids: int = 1 << 17  # token ids of /detokenize
    # of one client, together: bytes of bodies and of grammars whose requests have not ended
    bodies: int = 1 << 26
    grammars: int = 1 << 19
    read_seconds: float = 30.0  # for a body to wait for a thread, and to be read by it
    readers: int = 4  # threads that read bodies, for all clients
    reader_share: int = 2  # of them for one client
    send_seconds: float = 60.0  # for a reader to take each event


class Clients:
    """Owners of requests, by API key.

    keys: the accepted keys; without any, all requests are accepted. shares: True makes equal
        prompts of different requests one group if there are no keys.
    """

    def __init__(self, keys: Sequence[str], shares: bool):
        check_keys("keys", keys)
        self._keys, self._shares = [key.encode() for key in keys], shares
        self.open = not keys

    def owner(self, request: Request) -> str | None:
        """Owner of a request, which may share with its other requests; None: it shares with none.

        Raises Refused for a missing or wrong key.
        """
        if not self._keys:
            return "anyone" if self._shares else None
        return hashlib.sha256(self._key(request)).hexdigest()

    def client(self, request: Request) -> str:
        """Client whose shares a request uses: its key's digest, or its address."""
        if self._keys:
            return hashlib.sha256(self._key(request)).hexdigest()
        return request.client.host if request.client is not None else ""

    def sharing(self, client: str) -> str | None:
        """The client, if others may come whose places it must leave; None with one key."""
        return None if len(self._keys) == 1 else client

    def administrator(self, request: Request) -> None:
        """Raises Refused if there are keys and the request does not have the first one."""
        if self._keys and not hmac.compare_digest(self._key(request), self._keys[0]):
            raise Refused("this path requires the first --api-key", status=403, code="not_allowed")

    def _key(self, request: Request) -> bytes:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        key = given.strip().encode()
        if kind.lower() != "bearer" or not key:
            raise Refused("the API key is missing or wrong", status=401, code="invalid_api_key")
        # all keys are compared, so that the time does not depend on which one matches
        matches = [hmac.compare_digest(key, one) for one in self._keys]
        if not any(matches):
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
    """Bytes that each client holds at once, limited to `most`."""

    def __init__(self, what: str, most: int):
        self._what, self._most = what, most
        self._held: dict[str, int] = {}
        self._lock = threading.Lock()

    def take(self, client: str, size: int) -> None:
        """Raises Refused if the client would hold more than its limit."""
        with self._lock:
            held = self._held.get(client, 0) + size
            if held > self._most:
                raise Refused(
                    f"the {self._what} of this client's requests must have at most {self._most} "
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
    found = bytearray()

    async def read() -> None:
        async for chunk in request.stream():
            take(len(chunk))
            found.extend(chunk)
            if len(found) > limits.body:
                raise Refused(
                    f"the body must have at most {limits.body} bytes",
                    status=413,
                    code="body_too_large",
                )

    try:
        await asyncio.wait_for(read(), limits.body_seconds)
    except TimeoutError as error:
        raise Refused(
            f"the body was not received within {limits.body_seconds} seconds", status=408
        ) from error
    return bytes(found)


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


async def unless_gone(receive: Receive, result: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine, which is cancelled when the client disconnects.

    Raises ClientDisconnect in that case.
    """
    work = asyncio.ensure_future(result)
    leaving = asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        for task in (work, leaving):
            task.cancel()
        await asyncio.gather(work, leaving, return_exceptions=True)


async def results_of(asked: Asked) -> list[Any]:
    """Returns the results of all prompts. Raises the error that ended one."""
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
        self, events: AsyncIterator[bytes], answer: Answer, seconds: float, end: Callable[[], Any]
    ):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.events, self.answer, self.seconds, self.end = events, answer, seconds, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.answer.asked.cancel()
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
            await body(error_event(self.answer.refused(error)))
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


TEMPLATE = ("messages", "tools", "chat_template_kwargs")
GRAMMARS = ("response_format", "regex", "grammar")
# of `tool_choice`, that make no grammar of the tools
FREE = (None, "none", "auto")
STRINGS = ("stop", "bad_words", "thinking_tags")
IDS = ("logit_bias", "allowed_token_ids", "suppress_tokens", "stop_token_ids")


def check_sizes(body: Mapping[str, Any], limits: Limits, context: int, vocab: int) -> None:
    """Raises Refused, naming the field, for a value that takes long to read."""
    messages = body.get("messages")
    if isinstance(messages, list) and len(messages) > limits.turns:
        raise _over("messages", f"at most {limits.turns} messages", str(len(messages)))
    # a long context needs long messages
    longest = max(limits.template, 8 * context)
    _check_weight(TEMPLATE, body, longest)
    for name in _grammars(body):
        value = body.get(name)
        _check_weight((name,), body, limits.grammar)
        if (
            isinstance(value, dict | list)
            and (entries := _entries(value, limits.entries)) is not None
        ):
            raise _over(name, f"at most {limits.entries} values", f"at least {entries}")
    for name in STRINGS:
        _check_length(name, body.get(name), limits.strings, "strings")
        _check_weight((name,), body, limits.grammar)
    for name in IDS:
        _check_length(name, body.get(name), vocab, "token ids, the size of the vocabulary")


def grammar_size(body: Mapping[str, Any], limits: Limits) -> int:
    """Characters of a checked body's grammars."""
    values = [body.get(name) for name in _grammars(body) if body.get(name)]
    return weight(values, 2 * limits.grammar)


def _grammars(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Fields of a body that a grammar is compiled from."""
    choice = body.get("tool_choice")
    free = choice is None or (isinstance(choice, str) and choice in FREE)
    return GRAMMARS if free else (*GRAMMARS, "tools")


def weight(value: Any, most: int) -> int:
    """Number of characters and values in a value of JSON; counting ends beyond `most`."""
    total, left = 0, [value]
    while left and total <= most:
        one = left.pop()
        total += 1
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, int) and not isinstance(one, bool):
            total += one.bit_length() // 4
        elif isinstance(one, list):
            left.extend(one)
        elif isinstance(one, dict):
            total += sum(map(len, one))
            left.extend(one.values())
    return total


def _entries(value: Any, most: int) -> int | None:
    """The number of values in a value, if it is above `most`."""
    total, left = 0, [value]
    while left and total <= most:
        one = left.pop()
        inside = one if isinstance(one, list) else one.values() if isinstance(one, dict) else ()
        total += len(inside)
        left.extend(chain(inside))
    return total if total > most else None


def _check_weight(names: tuple[str, ...], body: Mapping[str, Any], most: int) -> None:
    weights = {name: weight(body[name], most) for name in names if body.get(name)}
    if (total := sum(weights.values())) > most:
        largest = max(weights, key=lambda name: weights[name])
        raise _over(
            " and ".join(weights),
            f"at most {most} characters and values",
            f"at least {total}",
            largest,
        )


def _check_length(name: str, value: Any, most: int, of: str) -> None:
    if isinstance(value, list | dict) and len(value) > most:
        raise _over(name, f"at most {most} {of}", str(len(value)))


def _over(name: str, expected: str, got: str, param: str | None = None) -> Refused:
    return Refused(f"{name} must have {expected}, got {got}", param=param or name)
