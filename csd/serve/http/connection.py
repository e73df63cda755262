"""`Connection`: uvicorn's protocol, which also closes connections that wait for nothing.

A connection costs a file and some memory whether or not its client sends or reads. uvicorn itself
limits only the time between two requests.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# limit for receiving the head of a request: of the first one, and after a response
HEAD_SECONDS, NEXT_SECONDS = 20.0, 50.0
# period in which a client must read a part of what was sent to it
READ_SECONDS = 30.0
# bytes that one read of a socket returns, since their parts are handled at once
READ_BYTES = 1 << 14
# bytes of a body that are read on and dropped after the answer to its request: many clients send a
# whole body before they read, and a connection that is closed before that loses the answer
DROPPED_BYTES = 1 << 26
# a body's parts must have MIN_PART bytes on average if there are more than SMALL_PARTS
MIN_PART, SMALL_PARTS = 64, 64

BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: 49\r\n\r\n"
    b"too many connections are open from this address.\n"
)


class Parser(h11.Connection):
    """Parser of requests, which refuses bodies in tiny parts: a part takes as long as a page.

    It also ends a body that goes on for long after its request has been answered.
    """

    _parts = _bytes = _dropped = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._parts = self._bytes = self._dropped = 0
        elif isinstance(event, h11.Data):
            self._parts += 1
            self._bytes += len(event.data)
            if self._parts > SMALL_PARTS and self._bytes < MIN_PART * self._parts:
                raise h11.RemoteProtocolError("the body has too many small parts")
            if self.our_state is h11.DONE:
                self._dropped += len(event.data)
                if self._dropped > DROPPED_BYTES:
                    raise h11.RemoteProtocolError("the body goes on after the answer")
        return event


class Connection(H11Protocol):
    """Connection that is closed if its client does not send a complete head in time or does not
    read, and at once if its address has more connections than are free.

    All clients behind a proxy have its address.
    """

    _late: asyncio.TimerHandle | None = None
    _reads: asyncio.TimerHandle | None = None
    _unread = 0
    _has_read = False

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.conn = Parser(h11.SERVER, self.conn._max_incomplete_event_size)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        others: Any = self.connections
        limit, address = self.limit_concurrency, self.client and self.client[0]
        own = sum((c.client and c.client[0]) == address for c in others)
        if limit is not None and own - 1 > limit - len(others):
            transport.write(BUSY)
            transport.close()
        if hasattr(transport, "max_size"):
            transport.max_size = READ_BYTES
        self._expect_head(HEAD_SECONDS)
        self._reads = self.loop.call_later(READ_SECONDS, self._check_reader)

    def data_received(self, data: bytes) -> None:
        # after a refusal, or after a body in parts
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_late()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request, whose application then sends nothing: a client that it has, has left.

        Else each of its errors would be a traceback in the log.
        """
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        self._expect_head(NEXT_SECONDS)
        # it may begin with the next request
        super().on_response_complete()
        if not self.cycle.response_complete:
            self._cancel_late()

    def resume_writing(self) -> None:
        self._has_read = True
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_late()
        if self._reads is not None:
            self._reads.cancel()
        super().connection_lost(exc)

    def _expect_head(self, seconds: float) -> None:
        self._cancel_late()
        self._late = self.loop.call_later(seconds, self.transport.close)

    def _cancel_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _check_reader(self) -> None:
        """Abort the connection if nothing was read in this period; a closed one waits for that."""
        unread = self.transport.get_write_buffer_size()
        if unread and unread >= self._unread > 0 and not self._has_read:
            self.transport.abort()
            return
        self._unread, self._has_read = unread, False
        self._reads = self.loop.call_later(READ_SECONDS, self._check_reader)
