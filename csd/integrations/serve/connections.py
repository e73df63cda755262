"""uvicorn's protocol, which also closes a connection on which no request comes."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

# until the head of a connection's first request is there
SECONDS = 20.0


class Connection(H11Protocol):
    """A client that opens a connection and sends nothing, or half a line, holds it SECONDS."""

    _silent: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._silent = self.loop.call_later(SECONDS, self._close_silent)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None:
            self._be_patient()

    def connection_lost(self, exc: Exception | None) -> None:
        self._be_patient()
        super().connection_lost(exc)

    def _be_patient(self) -> None:
        if self._silent is not None:
            self._silent.cancel()
            self._silent = None

    def _close_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()
