"""The server as an ASGI application, for `uvicorn` or a deployment of Ray Serve."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from csd.integrations.serve import endpoints
from csd.integrations.serve.clients import Limits
from csd.integrations.serve.origins import Guard
from csd.integrations.serve.server import Server

__all__ = ["Limits", "Server", "make_app"]

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
}


def make_app(server: Server) -> Starlette:
    """Returns the ASGI application, whose shutdown closes the engine."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        server.readers.close()
        await run_in_threadpool(server.engine.close, drain=False)

    app = Starlette(
        routes=[
            Route(path, endpoints.answered(endpoint), methods=[method])
            for path, (method, endpoint) in PATHS.items()
        ],
        exception_handlers={HTTPException: endpoints.not_found},
        # answers preflights, and adds to answers what lets a page of these origins read them
        middleware=[
            *(
                [
                    Middleware(
                        CORSMiddleware,
                        allow_origins=server.origins,
                        allow_methods=["GET", "POST"],
                        allow_headers=["*"],
                    )
                ]
                if server.origins
                else []
            ),
            Middleware(Guard, hosts=server.hosts, origins=server.origins, open=server.clients.open),
        ],
        lifespan=lifespan,
    )
    app.state.server = server
    return app
