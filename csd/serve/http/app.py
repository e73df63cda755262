"""The server as an ASGI application, for `uvicorn` or a deployment of Ray Serve.

`Guard` refuses requests that a browser sends for a page of another origin. A server without keys
trusts whoever reaches it, and a browser reaches 127.0.0.1 for any page. A page's requests have its
`Origin`; a page under a name that resolves to the server's address has that name as `Host`; and
without a preflight a page can send only texts and forms.
"""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from csd.serve.http import endpoints
from csd.serve.http.access_log import Entry
from csd.serve.http.errors import Refused
from csd.serve.http.server import Server
from csd.utils.check import shown


class Guard:
    """ASGI middleware that refuses requests of foreign pages, on all paths.

    hosts: names that `Host` may have beside loopback and the server's own address. origins: of
    pages that may use the server. open: True if the server has no keys; otherwise a page needs a
    key, and only `hosts` are checked, if there are any.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], origins: Collection[str], open: bool):
        self.app, self.open = app, open
        self.hosts = {_host(name) for name in hosts}
        self.origins = {origin.rstrip("/").lower() for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self.refusal(scope) if scope["type"] in ("http", "websocket") else None
        if refused is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await Entry(Request(scope)).of(refused.response())(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008, "reason": refused.message})

    def refusal(self, scope: Scope) -> Refused | None:
        """The error of a request that is refused; None for any other."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if (self.open or self.hosts) and not self._is_own(host, scope):
            return Refused(
                f"the Host header must be a loopback address or a name of --allowed-host, got "
                f"{shown(host)}",
                status=403,
                code="host_not_allowed",
            )
        if not self.open:
            return None
        origin = headers.get("origin")
        if origin is not None and not self._is_allowed(origin, host):
            return Refused(
                "pages of other origins may not use the server unless --allow-origin names "
                f"theirs, got Origin {shown(origin)}",
                status=403,
                code="origin_not_allowed",
            )
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope.get("method") == "POST" and kind != "application/json":
            return Refused(
                "the body must be sent with the header 'Content-Type: application/json', got "
                f"{shown(kind)}",
                status=415,
                code="content_type",
            )
        return None

    def _is_own(self, host: str, scope: Scope) -> bool:
        name = _host(host)
        if name == "localhost" or name in self.hosts:
            return True
        try:
            address = ip_address(name)
        except ValueError:
            return False
        # an address in Host is no name that another page's owner could let point here
        return address.is_loopback or name == _host((scope.get("server") or ("",))[0] or "")

    def _is_allowed(self, origin: str, host: str) -> bool:
        origin = origin.lower()
        # a proxy may speak TLS with the browser
        own = {f"{scheme}://{host.lower()}" for scheme in ("http", "https")}
        return origin in own or origin in self.origins


def _host(text: str) -> str:
    """Host without a port, in lower case; "" if the text is no host."""
    try:
        text = f"[{text}]" if text.count(":") > 1 and not text.startswith("[") else text
        return urlsplit(f"//{text}").hostname or ""
    except ValueError:
        return ""


def check_origin(name: str, value: str) -> str:
    """Returns an origin such as https://example.com. Raises ValueError, naming the argument."""
    try:
        parts = urlsplit(value)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.netloc
        if whole and value.rstrip("/") == f"{parts.scheme}://{parts.netloc}":
            return value.rstrip("/")
    except ValueError:
        pass
    raise ValueError(f"{name} must be an origin such as https://example.com, got {shown(value)}")


def check_host(name: str, value: str) -> str:
    """Returns the name of a host, without a port. Raises ValueError, naming the argument."""
    if not value or _host(value) != value.lower():
        raise ValueError(f"{name} must be the name of a host without a port, got {shown(value)}")
    return value


PATHS = {
    "/": ("GET", endpoints.page),
    "/health": ("GET", endpoints.health),
    "/version": ("GET", endpoints.version),
    "/metrics": ("GET", endpoints.metrics),
    "/stats": ("GET", endpoints.stats),
    "/tokenize": ("POST", endpoints.tokenize),
    "/detokenize": ("POST", endpoints.detokenize),
    "/tokenizer_info": ("GET", endpoints.tokenizer_info),
    "/update_weights": ("POST", endpoints.update_weights),
    "/v1/models": ("GET", endpoints.models),
    "/v1/models/{name:path}": ("GET", endpoints.models),
    "/v1/completions": ("POST", endpoints.completions),
    "/v1/chat/completions": ("POST", endpoints.chat_completions),
    "/v1/responses": ("POST", endpoints.responses),
}


def make_app(server: Server) -> Starlette:
    """Returns the ASGI application, whose shutdown closes the engine."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        server.readers.close()
        await run_in_threadpool(server.engine.close, drain=False)

    origins, open_to_all = server.origins, server.clients.open
    middleware = [Middleware(Guard, hosts=server.hosts, origins=origins, open=open_to_all)]
    if origins:
        # answers preflights, and adds to answers what lets a page of these origins read them
        allowed: Any = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        middleware.insert(0, Middleware(CORSMiddleware, allow_origins=origins, **allowed))
    app = Starlette(
        routes=[
            Route(path, endpoints.answered(endpoint), methods=[method])
            for path, (method, endpoint) in PATHS.items()
        ],
        exception_handlers={HTTPException: endpoints.not_found},
        middleware=middleware,
        lifespan=lifespan,
    )
    app.state.server = server
    return app
