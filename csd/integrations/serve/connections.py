"""uvicorn's protocol, which also closes connections that send no request."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

# limit for receiving the head of a connection's first request
SECONDS = 20.0


class Connection(H11Protocol):
    """Connection that is closed after SECONDS without the complete head of a request."""

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
