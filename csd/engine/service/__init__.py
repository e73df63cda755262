"""An engine that takes requests while it runs.

asking.py        a request as its caller asks for it
handle.py        what a caller has of a request: news of its samples, its end
inbox.py         requests, cancellations and changes on their way to the engine's thread
scheduler.py     a scheduler that takes them in between two steps
twins.py         samples that several requests ask for
admission.py     what a request needs when it is admitted
room.py          caches whose sizes are fixed at the start
weights.py       which weights drew a request, and when they were changed
counters.py      what has been drawn so far
async_engine.py  the thread, and what its callers call
"""

from csd.engine.service.async_engine import AsyncEngine
from csd.engine.service.handle import Handle, Piece, news
from csd.engine.service.inbox import Closed, QueueFull

__all__ = ["AsyncEngine", "Closed", "Handle", "Piece", "QueueFull", "news"]
