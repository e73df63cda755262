"""Identity of the weights that draw a request: a version that counts changes, a fingerprint."""

from typing import Any

from csd.engine.engine import Engine
from csd.engine.resources.weights import ModelKey
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
        self._key: ModelKey | None = None

    def mark(self, engine: Engine) -> None:
        """Update version and fingerprint if the model changed; called with nothing in flight."""
        key = engine.model.key
        if engine.decoder is self._decoder and key == self._key:
            return
        self.version += self._decoder is not None
        self._decoder, self._key = engine.decoder, key
        self.fingerprint = engine.caches.fingerprint()

    @plain_torch()
    def replace(self, engine: Engine, folder: str) -> int:
        """Load the weights of a folder, and its tokenizer if there is one; returns the version.

        The old weights stay until the new ones are loaded, and if these cannot be loaded.
        """
        loaded = engine.model.load(folder)
        with engine.between_calls():
            engine.take(loaded)
            self.mark(engine)
        return self.version
