"""`csd serve`: OpenAI's HTTP interface over one `csd.AsyncEngine`, in which `n` is a group.

    fields.py      the fields of a request, and what each is called here
    asked.py       a body, read and checked
    answers.py     choices, log-probabilities and usage
    events.py      the same as they are drawn
    errors.py      errors as OpenAI's clients expect them
    clients.py     keys, bodies and readers: what a client may take
    endpoints.py   the paths
    metrics.py     totals for Prometheus and for the page at /
    app.py         all of it as an ASGI application
    connections.py uvicorn's protocol, for clients that send nothing
    run.py         the process: signals, draining, exit

It needs starlette and uvicorn: pip install 'csd[serve]'.
"""

from csd.integrations.serve.app import Limits, Server, make_app
from csd.integrations.serve.run import process, serve

__all__ = ["Limits", "Server", "make_app", "process", "serve"]
