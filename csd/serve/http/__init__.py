"""`csd serve`: OpenAI's HTTP interface over one `csd.AsyncEngine`, in which `n` is a group.

    run.py             the process: signals, draining, exit
    app.py             the server as an ASGI application; browsers: Host, Origin and Content-Type;
                       uvicorn's protocol, with a limit for clients that send nothing
    server.py          state that the handlers share
    endpoints.py       the handlers of the paths
    clients.py         API keys; time of bodies and readers; threads that read bodies, by client
    request.py         parsing and checks of a body
    fields.py          the engine's option for each field; fields that are ignored or refused, and
                       values that ask for nothing
    names.py           names of the engine's options in requests and errors
    checks.py          limits of requests, and checks of bodies before anything is computed
    response.py        choices, log-probabilities and usage
    events.py          the same as events, while tokens are drawn
    errors.py          errors as OpenAI's clients expect them
    metrics.py         totals for Prometheus and for the page at /

It needs starlette and uvicorn: pip install 'csd-llm[serve]'.
"""

from csd.serve.http.app import Limits, Server, make_app
from csd.serve.http.run import process, serve

__all__ = ["Limits", "Server", "make_app", "process", "serve"]
