"""Exclusive use of an engine's caches: calls on one engine run one after another."""

import threading
from collections.abc import Callable

import torch

from csd.engine.resources.model import EngineModel
from csd.utils.cache_folder import watch_forks
from csd.utils.device import stream_of


class Turn:
    """The use of an engine by one thread: `with turn.lock, turn as stream:`.

    The block's work on a GPU follows that of the block before, whose stream may be another one.
    The lock is entered by itself, since an interrupt may raise at any line of Python. No part is a
    context manager of contextlib, which would set the traceback of a caller's exception: that may
    be immutable.
    """

    def __init__(self, model: EngineModel):
        self.lock = threading.Lock()
        self._model = model
        self._thread: int | None = None  # the one that holds the lock, or the last one that did
        self._stream: torch.cuda.Stream | None = None  # of the block
        self._last: torch.cuda.Event | None = None  # end of the last block's work
        watch_forks(self)

    def __enter__(self) -> torch.cuda.Stream | None:
        self._thread = threading.get_ident()
        self._stream = stream_of(self._model.device)
        if self._stream is not None and self._last is not None:
            self._stream.wait_event(self._last)
        return self._stream

    def __exit__(self, *exc: object) -> None:
        self._last = None if self._stream is None else self._stream.record_event()

    def unless_used(self, function: Callable[[], None]) -> bool:
        """Call `function` within the lock; False, without a call, while a thread holds it."""
        if not self.lock.acquire(blocking=False):
            return False
        try:
            function()
        finally:
            self.lock.release()
        return True

    @property
    def is_mine(self) -> bool:
        """True if this thread is within the block."""
        return self.lock.locked() and self._thread == threading.get_ident()

    def check(self) -> None:
        """Raises RuntimeError in the block's own thread, which would wait for itself."""
        if self.is_mine:
            raise RuntimeError("this engine is still used by a stream; close the stream first")

    def after_fork(self) -> None:
        # the next call drops the unfinished state of a call of another thread
        if not self.is_mine:
            self.lock = threading.Lock()
