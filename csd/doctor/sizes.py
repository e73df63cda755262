"""Sizes of a check: the model, its prompts and pools."""

from dataclasses import dataclass

import torch

from csd.engine.options.params import SamplingParams
from csd.engine.requests.request import Request
from csd.models.fused.config import ModelConfig

# the default model, and its vocabulary on a GPU, large enough that kernels cut it into chunks
SMALL = ModelConfig(
    family="qwen3",
    vocab=499,
    hidden=64,
    intermediate=160,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    context=1024,
    norm_eps=1e-6,
    rope_theta=10000.0,
    qk_norm=True,
)
LARGE_VOCAB = 128_256
SAMPLES, SLOTS, NODES = 3, 4, 16
SHORT = (9, 8, 30, 31, 9, 8)
SEED = 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a check; the defaults reach every loop of every kernel.

    The defaults have full pages, several chunks and large pools.
    """

    prompt: int = 700  # tokens of the long prompt
    prefill_chunk: int = 256
    # tokens of its samples: more than a page and the most tokens that a step commits
    tokens: int = 82
    rows: int = 256  # rows of the largest pool

    def requests(self, vocab: int) -> list[Request]:
        """Requests of two prompts: samples share much text in one, and little in the other."""
        return [
            self._request(0, self._long(vocab), self.tokens, temperature=0.3),
            self._request(1, [t % vocab for t in SHORT], min(self.tokens, 12), temperature=0.8),
        ]

    def filtered(self, vocab: int) -> list[Request]:
        """Requests of the short prompt with every filter, and with a nucleus too large to list."""
        prompt = [t % vocab for t in SHORT]
        return [
            self._request(0, prompt, 1, temperature=2.0),
            self._request(
                1, prompt[:-1], 2, temperature=0.8, top_k=50, min_p=1e-4, repetition_penalty=1.2
            ),
            self._request(2, prompt[:-2], 2, temperature=0.5, top_p=0.9),
        ]

    def wide(self, vocab: int) -> list[Request]:
        """A request that fills every slot with a sample of the long prompt, for a few steps."""
        return [self._request(0, self._long(vocab), 2, SLOTS, temperature=0.3)]

    def _request(
        self, index: int, prompt: list[int], tokens: int, samples: int = SAMPLES, **filters: float
    ) -> Request:
        params = SamplingParams(max_new_tokens=tokens, **filters)
        return Request.of(index, prompt, params, range(samples), SEED)

    def _long(self, vocab: int) -> list[int]:
        """Random tokens followed by a repetition of the first ones, so that drafts are found."""
        generator = torch.Generator().manual_seed(0)
        again = self.prompt // 4
        fresh = torch.randint(vocab, (self.prompt - again,), generator=generator).tolist()
        return [*fresh, *fresh[:again]]
