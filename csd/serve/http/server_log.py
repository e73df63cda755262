"""Lines of the server's log that clients could cause as often as they like: one in QUIET seconds.

`unaccepted` is the handler of an event loop's errors. asyncio writes a traceback for each attempt
to accept a connection without a free descriptor, thousands in a second. `seldom` is a filter of
uvicorn's warnings about requests, `is_news` one of what a forced end cancels.
"""

import asyncio
import errno
import logging
import time
from collections.abc import Mapping
from typing import Any

LOG = logging.getLogger("csd")

QUIET = 60.0
# errors of a connection for which the system has no resource left; asyncio tries again in a second
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# time of the next line of each text
_next: dict[str, float] = {}


def may_write(text: str) -> bool:
    """True if a line with this text may be written now."""
    now = time.monotonic()
    if now < _next.get(text, 0.0):
        return False
    _next[text] = now + QUIET
    return True


def unaccepted(loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """Write one line for all connections without descriptors, and other errors as asyncio does."""
    error = context.get("exception")
    of_accept = "accept" in str(context.get("message"))
    if not (of_accept and isinstance(error, OSError) and error.errno in EXHAUSTED):
        loop.default_exception_handler(dict(context))
    elif may_write(f"accept {error.errno}"):
        LOG.warning(
            "csd serve: connections wait, since the process can open no more (%s; see ulimit -n); "
            "this line comes at most once in %d seconds",
            error.strerror,
            QUIET,
        )


def seldom(record: logging.LogRecord) -> bool:
    """False for a warning whose text was written less than QUIET seconds ago."""
    if record.levelno != logging.WARNING or record.exc_info is not None:
        return True
    return may_write(str(record.msg))


def is_news(record: logging.LogRecord) -> bool:
    """False for a record of a request, or of the application, that the drain's end cancelled."""
    if record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError):
        return False
    return not record.getMessage().rstrip().endswith("CancelledError")
