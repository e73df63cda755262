"""`csd serve`: OpenAI's HTTP interface over one `csd.AsyncEngine`, in which `n` is a group.

    fields.py      the fields of a request, and the engine's option for each
    fields.py the fields that are ignored or refused, and values that ask for nothing
    request.py       parsing and checks of a body
    answers.py     choices, log-probabilities and usage
    events.py      the same as events, while tokens are drawn
    errors.py      errors as OpenAI's clients expect them
    clients.py     API keys, and limits of bodies and readers
    app.py     browsers: Host, Origin and Content-Type
    template_names.py the names that clients may set for a chat template
    sizes.py       limits of values whose reading takes time
    readers.py     threads that read bodies, in shares of clients
    endpoints.py   the handlers of the paths
    metrics.py     totals for Prometheus and for the page at /
    app.py         the server as an ASGI application
    app.py uvicorn's protocol, with a limit for clients that send nothing
    run.py         the process: signals, draining, exit

It needs starlette and uvicorn: pip install 'csd-llm[serve]'.
"""

from csd.serve.http.app import Limits, Server, make_app
from csd.serve.http.run import process, serve

__all__ = ["Limits", "Server", "make_app", "process", "serve"]
