"""Identity of the weights that draw a request: a version that counts changes, a fingerprint."""

import hashlib
from collections.abc import Hashable
from typing import Any

import torch

from csd.engine.engine import Engine
from csd.engine.resources.weights import tensor_versions
from csd.engine.step.prefill import read_prompt
from csd.models.load import load
from csd.state.kv_cache import PAGE
from csd.utils.device import current
from csd.utils.torch_state import plain_torch

# tokens of the text whose logits are hashed for the fingerprint; they fit in a page
PROBE = 48


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
        state = tensor_versions(engine._loaded, begun=True)
        if engine.decoder is self._decoder and state == self._state:
            return
        self.version += self._decoder is not None
        self._decoder, self._state = engine.decoder, state
        self.fingerprint = fingerprint(engine)

    def stale(self, engine: Engine) -> bool:
        """True if tensors of the model were replaced or written since `mark`, or if the active
        adapters differ."""
        return tensor_versions(engine._loaded) != self._state

    @plain_torch()
    def replace(self, engine: Engine, folder: str) -> None:
        """Load the weights of a folder, and its tokenizer if there is one.

        The old weights stay until the new ones are loaded, and if these cannot be loaded.
        """
        loaded = load(
            folder, dtype=engine.dtype, device=engine.device, decoder=engine._loaded.wanted
        )
        if loaded.tokenizer is None:
            loaded.tokenizer = engine.tokenizer
        with engine._lock, current(engine.device):
            engine._take(loaded)
            self.mark(engine)


@torch.no_grad()
def fingerprint(engine: Engine) -> str:
    """Fingerprint of an engine: a digest of logits, the dtype, and "exact" or "rounding".

    The digest hashes the bits of the last logits of a text whose tokens span the vocabulary. Equal
    fingerprints mean equal weights, dtype and arithmetic, whatever file the weights came from.
    """
    config = engine.decoder.config
    count = min(PROBE, config.vocab, config.context, PAGE)
    tokens = torch.linspace(0, config.vocab - 1, count).round().int().tolist()
    with torch.inference_mode(False):
        step = engine._allocate(1, 1, 1, 1, 1)
    step.drafting = False
    step.cache.take(step.cache.prompt_pages, 0, count)
    logits = engine.decoder.logits(read_prompt(step, 0, tokens, 0)[-8:])
    bits = logits.contiguous().cpu().view(torch.uint8).numpy().tobytes()
    digest = hashlib.blake2b(bits, digest_size=6).hexdigest()
    kind = "exact" if engine.exact else "rounding"
    return f"csd-{digest}-{str(engine.dtype).removeprefix('torch.')}-{kind}"
