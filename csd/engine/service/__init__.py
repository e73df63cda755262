"""Engine that accepts requests while it runs.

asking.py        reading and checking of a request's arguments
handle.py        the engine's side of a request: new tokens of its samples, its end
reader.py        the caller's side of a request
inbox.py         queue of requests, cancellations and changes for the engine's thread
scheduler.py     scheduler that admits requests between two steps
turns.py         owners' shares of the slots
twins.py         samples that several requests share
admission.py     checks and allocations when a request is admitted
room.py          caches whose sizes are fixed at the start
weights.py       version and fingerprint of the weights that drew a request
counters.py      totals since the start
async_engine.py  the engine's thread, and the interface for callers
"""

from csd.engine.service.async_engine import AsyncEngine
from csd.engine.service.handle import Piece
from csd.engine.service.inbox import Closed, QueueFull
from csd.engine.service.reader import Reader, news

__all__ = ["AsyncEngine", "Closed", "Piece", "QueueFull", "Reader", "news"]
