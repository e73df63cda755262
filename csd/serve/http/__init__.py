"""`csd serve`: OpenAI's HTTP interface over one `csd.AsyncEngine`, in which `n` is a group.

    run.py             the process: signals, draining, exit
    app.py             the server as an ASGI application; browsers: Host, Origin and Content-Type
    connection.py      uvicorn's protocol, with limits for clients that send or read nothing
    server.py          state that the handlers share
    endpoints.py       the handlers of the paths
    clients.py         API keys; time of bodies and readers; threads that read bodies, by client
    checks.py          limits of requests, and checks of bodies before anything is computed
    json_parts.py      JSON that is read and written in parts
    api/               OpenAI's API: bodies, choices, events, tools
    names.py           names of the engine's options in requests and errors
    errors.py          errors as OpenAI's clients expect them
    access_log.py      ids of requests, and a line of the log for each
    server_log.py      lines of the log that clients could cause, one a minute
    metrics.py         totals for Prometheus and for the page at /

It needs starlette and uvicorn: pip install 'starlette>=0.45' 'uvicorn>=0.34'.
"""

from csd.serve.http.app import make_app
from csd.serve.http.checks import Limits
from csd.serve.http.run import process, serve
from csd.serve.http.server import Server

__all__ = ["Limits", "Server", "make_app", "process", "serve"]
