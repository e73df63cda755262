"""`csd.AsyncEngine`: an engine that accepts requests while it runs, and its HTTP server.

    async_engine.py  checks of a request's arguments; the engine's thread; the interface for callers
    inbox.py         queue of requests, cancellations and changes for that thread; totals
    served_requests.py  requests of a run, from the inbox to their ends
    policy.py        whose prompt is read, and whose sample gets a slot
    turns.py         owners' shares of the slots
    places.py        clients' shares of the queue and of other places
    twins.py         samples that several requests share
    handle.py        the engine's side of a request: new tokens of its samples, its end
    reader.py        the caller's side of a request
    session.py       texts that are continued in turns
    repeats.py       notice of requests that repeat a prompt with its seed
    histogram.py     counts of durations
    weights.py       version and fingerprint of the weights that drew a request
    http/            `csd serve`: OpenAI's interface

A request is checked in the thread of its caller, waits in the inbox, and is admitted between two
steps. `ServedRequests` gives the tokens of each step to the request's handle, and wakes its reader.
docs/serve.md has the way from a request to its first token, file by file.
"""

from csd.serve.async_engine import AsyncEngine
from csd.serve.handle import Piece
from csd.serve.inbox import Closed, QueueFull
from csd.serve.reader import Reader, news
from csd.utils.lazy import submodules

__all__ = ["AsyncEngine", "Closed", "Piece", "QueueFull", "Reader", "news"]

# `http` needs packages that csd alone does not
__getattr__ = submodules(__name__)
