"""Identity of the weights that draw a request: a version that counts changes, a fingerprint."""

from collections.abc import Hashable
from typing import Any

from csd.engine.engine import Engine
from csd.utils.torch_state import plain_torch


class Weights:
    """Version and fingerprint of one engine's weights.

    Both are updated while nothing is in flight. Requests in flight read a user's module as it is: a
    tensor that is written in place changes their next step.
    """

    def __init__(self) -> None:
        self.version = 0
        self.fingerprint = ""
        self._decoder: Any = None
        self._state: Hashable = None

    def mark(self, engine: Engine) -> None:
        """Update version and fingerprint if the weights changed; called with nothing in flight."""
        state = engine.model.tensor_versions(begun=True)
        if engine.decoder is self._decoder and state == self._state:
            return
        self.version += self._decoder is not None
        self._decoder, self._state = engine.decoder, state
        self.fingerprint = engine.caches.fingerprint()

    def stale(self, engine: Engine) -> bool:
        """True if tensors of the model were replaced or written since `mark`, or if the active
        adapters differ."""
        return engine.model.tensor_versions() != self._state

    @plain_torch()
    def replace(self, engine: Engine, folder: str) -> None:
        """Load the weights of a folder, and its tokenizer if there is one.

        The old weights stay until the new ones are loaded, and if these cannot be loaded.
        """
        loaded = engine.model.load(folder)
        with engine.between_calls():
            engine.take(loaded)
            self.mark(engine)
