"""Ids of requests, in answers and in the log, and a line of the log for each request.

The logger `csd.access` has a line at the level INFO once a response has ended, or its client left:
the client's address, method, path, status, seconds and the request's id.
"""

import logging
import re
import time
import uuid

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from csd.utils.check import one_line

LOG = logging.getLogger("csd.access")
HEADER = "X-Request-Id"
# an id of a client that goes into headers and lines as it is
_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}\Z")


class Entry:
    """A request for the log. Its id is the client's X-Request-Id, if that is one, or a new one."""

    def __init__(self, request: Request):
        self._request, self._begun = request, time.perf_counter()
        own = request.headers.get(HEADER, "")
        self.id = own if _ID.match(own) else uuid.uuid4().hex

    def of(self, response: Response) -> ASGIApp:
        """The response with the id, whose end writes the line."""
        response.headers[HEADER] = self.id

        async def logged(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await response(scope, receive, send)
            finally:
                client = self._request.client
                LOG.info(
                    "%s %s %s %d %.3f s %s",
                    client.host if client is not None else "-",
                    self._request.method,
                    one_line(self._request.url.path),
                    response.status_code,
                    time.perf_counter() - self._begun,
                    self.id,
                )

        return logged
