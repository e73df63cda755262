"""Engine that accepts requests while it runs.

async_engine.py        reading and checking of a request's arguments
handle.py        the engine's side of a request: new tokens of its samples, its end
reader.py        the caller's side of a request
inbox.py         queue of requests, cancellations and changes for the engine's thread
scheduler.py     scheduler that admits requests between two steps
turns.py         owners' shares of the slots
twins.py         samples that several requests share
scheduler.py     checks and allocations when a request is admitted
caches.py          caches whose sizes are fixed at the start
weights.py       version and fingerprint of the weights that drew a request
inbox.py      totals since the start
async_engine.py  the engine's thread, and the interface for callers
"""

from csd.serve.async_engine import AsyncEngine
from csd.serve.handle import Piece
from csd.serve.inbox import Closed, QueueFull
from csd.serve.reader import Reader, news

__all__ = ["AsyncEngine", "Closed", "Piece", "QueueFull", "Reader", "news"]
