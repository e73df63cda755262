"""The process of a server: it listens, and on SIGTERM answers what it has accepted and ends."""

import logging
import sys
import threading
from types import FrameType

import uvicorn

from csd.integrations.serve.app import make_app
from csd.integrations.serve.connections import Connection
from csd.integrations.serve.server import Server

LOG = logging.getLogger("csd")

# seconds in which a thread may hold Python's lock while another waits for it: the engine's thread
# takes it back between any two operations, and the default is a tenth of a small model's step
SWITCH = 0.0005


class Process(uvicorn.Server):
    """drain: seconds that accepted requests have once the process is to end."""

    def __init__(self, server: Server, config: uvicorn.Config, drain: float):
        super().__init__(config)
        self._served, self._drain = server, drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        first = not self.should_exit
        super().handle_exit(sig, frame)
        if first:
            LOG.warning("csd serve: draining for at most %g seconds", self._drain)
            # no new requests; those that were accepted go on until the time is over
            self._end(drain=True)
            late = threading.Timer(self._drain, self._end, kwargs={"drain": False})
            late.daemon = True
            late.start()

    def _end(self, drain: bool) -> None:
        # a signal's handler waits for no thread
        self._served.engine.close(drain=drain, timeout=0)


def serve(
    server: Server,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    drain: float = 30.0,
    connections: int = 2048,
    log_level: str = "warning",
) -> None:
    """Listen until SIGINT or SIGTERM; accepted requests are answered, or refused when `drain`
    seconds have passed. connections: that are open at most, those in use included."""
    sys.setswitchinterval(SWITCH)
    config = uvicorn.Config(
        make_app(server), host=host, port=port, http=Connection, ws="none", lifespan="on",
        log_level=log_level, access_log=False, limit_concurrency=connections,
        timeout_keep_alive=30, timeout_graceful_shutdown=int(drain) + 10, server_header=False,
    )  # fmt: skip
    Process(server, config, drain).run()
