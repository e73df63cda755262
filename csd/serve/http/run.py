"""The server's process, which on SIGTERM answers the accepted requests and exits."""

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from types import FrameType
from typing import Any

import uvicorn

from csd.engine.options.engine_arguments import ServerOptions
from csd.serve.http.app import make_app
from csd.serve.http.connection import Connection
from csd.serve.http.server import Server
from csd.serve.http.server_log import is_news, seldom, unaccepted
from csd.utils.arguments import default_of

LOG = logging.getLogger("csd")

HOST: str = default_of(ServerOptions, "host")
PORT: int = default_of(ServerOptions, "port")
DRAIN: float = default_of(ServerOptions, "drain")
CONNECTIONS: int = default_of(ServerOptions, "max_connections")
# seconds for which a thread may hold Python's lock while another waits for it: the engine's thread
# reacquires it between any two operations, and the default is a tenth of a small model's step
SWITCH = 0.0005
# seconds after the drain in which connections are closed, and after which the process is killed
CLOSING, ENDING = 2, 5

# descriptors that are no connections: files of the model, of libraries and of logs
OTHER_FILES = 128


class Process(uvicorn.Server):
    """uvicorn server that drains the engine before it exits.

    drain: seconds that accepted requests have after the signal to exit. begun: called with the port
        once the server listens.
    """

    def __init__(
        self, server: Server, config: uvicorn.Config, drain: float, begun: Callable[[int], Any]
    ):
        super().__init__(config)
        self._served, self._drain, self._begun = server, drain, begun

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(unaccepted)
        logging.getLogger("uvicorn.error").addFilter(seldom)
        try:
            await super().startup(sockets)
        except OSError as error:
            # another process may listen at an address to which this one is bound only
            raise _unusable(self.config.host, self.config.port, error) from error
        if self.started:
            self._begun(self.servers[0].sockets[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            # a second signal: what is in flight ends now, and its answers are sent
            self._end(drain=False)
            _later(CLOSING, self._force)
            return
        super().handle_exit(sig, frame)
        LOG.warning(
            "csd serve: shutting down; accepted requests have at most %g seconds to finish",
            self._drain,
        )
        # new requests are refused; accepted ones continue until the time limit
        self._end(drain=True)
        _later(self._drain, lambda: self._end(drain=False))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logging.getLogger("uvicorn.error").addFilter(is_news)
        await super().shutdown(sockets)

    def _force(self) -> None:
        """Cancel requests that a thread still computes for."""
        self.force_exit = True

    def _end(self, drain: bool) -> None:
        # timeout=0: a signal handler must not wait for a thread
        self._served.engine.close(drain=drain, timeout=0)


def _later(seconds: float, act: Callable[[], Any]) -> None:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


def connection_limit(wanted: int) -> int:
    """Number of connections, at most `wanted`, for which the process may open descriptors."""
    try:
        import resource
    # Windows has no such limit
    except ImportError:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    limit = max(soft - OTHER_FILES, soft // 2, 1)
    LOG.warning(
        "csd serve: max_connections is %d instead of %d, since the process may open only %d "
        "files (ulimit -Hn)",
        limit,
        wanted,
        soft,
    )
    return limit


def is_loopback(host: str) -> bool:
    """True if only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def bound(host: str, port: int) -> list[socket.socket]:
    """Sockets at a host's addresses, which do not listen yet: a client is refused until they do.

    Raises OSError, which names the flag to change.
    """
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # a name that no domain can have is refused by its encoding
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise OSError(f"host {host!r} has no address: {why}; give another --host") from error
    for family, kind, protocol, _, address in dict.fromkeys(found):
        try:
            made = socket.socket(family, kind, protocol)
        except OSError:
            # a kernel without IPv6
            continue
        sockets.append(made)
        # as asyncio sets them: a port whose last connections have just ended is free
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, os.name == "posix")
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, True)
        try:
            made.bind(address)
        except OSError as error:
            for one in sockets:
                one.close()
            raise _unusable(host, port, error) from error
    return sockets


def _unusable(host: str, port: int, error: OSError) -> OSError:
    advice = "give another --host" if error.errno == errno.EADDRNOTAVAIL else "give another --port"
    if error.errno == errno.EADDRINUSE:
        advice = "end what uses it, or give another --port; 0 takes a free one"
    return OSError(f"port {port} of {host} cannot be bound: {error.strerror}; {advice}")


def process(
    server: Server,
    *,
    host: str = HOST,
    port: int = PORT,
    drain: float = DRAIN,
    connections: int = CONNECTIONS,
    begun: Callable[[int], Any] = lambda port: None,
    log_level: str = "warning",
) -> Process:
    """Make a process whose `run` listens until SIGINT or SIGTERM.

    After the signal, accepted requests are answered, or refused once `drain` seconds have passed.
    connections: limit of open connections, idle ones included, at most the number of files that
        the process may open. begun: called with the port.
    """
    if server.clients.open and not is_loopback(host):
        LOG.warning(
            "csd serve: anyone who reaches %s can use the server: set --api-key or CSD_API_KEYS",
            host,
        )
    config = uvicorn.Config(
        make_app(server),
        host=host,
        port=port,
        http=Connection,
        ws="none",
        lifespan="on",
        log_level=log_level,
        access_log=False,
        limit_concurrency=connection_limit(connections),
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(drain) + CLOSING,
        server_header=False,
    )
    return Process(server, config, drain, begun)


def serve(
    server: Server,
    *,
    drain: float = DRAIN,
    sockets: list[socket.socket] | None = None,
    **options: Any,
) -> None:
    """Run a `process` with these options until a signal ends it; then end this process.

    Threads that still compute for a client are not waited for. sockets: at which to listen, as
    `bound` returns them; by default those of the host and port.
    """
    sys.setswitchinterval(SWITCH)
    running = process(server, drain=drain, **options)
    for signum in (signal.SIGINT, signal.SIGTERM):
        # uvicorn raises a signal again at its end, after it has handled it
        signal.signal(signum, lambda *_: None)
    end_by(drain + ENDING)
    # a collection of garbage takes tenths of a second over the modules and the model, which stay,
    # and the values in one body are enough to begin one
    gc.collect()
    gc.freeze()
    running.run(sockets)
    if running.started:
        logging.shutdown()
        # a service may have none, or a pipe whose reader has ended
        with suppress(AttributeError, OSError, ValueError):
            sys.stdout.flush()
        os._exit(0)


# arguments: the process to kill, and the seconds that it has after a signal that is read from stdin
WATCHDOG = """
import os, select, signal, sys, time
process, seconds = int(sys.argv[1]), float(sys.argv[2])
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(signum, signal.SIG_IGN)
late = None
while late is None or late > time.monotonic():
    ready, _, _ = select.select([0], [], [], None if late is None else late - time.monotonic())
    if ready:
        read = os.read(0, 64)
        if not read:
            sys.exit()
        if late is None and {signal.SIGINT, signal.SIGTERM} & {*read}:
            late = time.monotonic() + seconds
if os.getppid() == process:
    os.kill(process, signal.SIGKILL)
"""


def end_by(seconds: float) -> None:
    """Let a watchdog process kill this one if it runs on for that time after SIGINT or SIGTERM.

    Python's own handlers, threads and timers wait for the interpreter's lock, which a template or
    a tokenizer may hold for minutes. The watchdog reads the numbers of signals, which Python's C
    handler writes at once.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    command = [sys.executable, "-I", "-S", "-c", WATCHDOG, str(os.getpid()), str(seconds)]
    try:
        subprocess.Popen(command, stdin=reader, stdout=subprocess.DEVNULL)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    except OSError as error:
        LOG.warning("no watchdog ends csd serve if it hangs after a signal: %s", error)
    finally:
        os.close(reader)
