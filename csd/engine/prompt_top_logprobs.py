"""Log-probabilities of a prompt's own tokens, from the pass that reads it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

# rows whose logits are in memory at the same time
ROWS = 64


@dataclass(slots=True)
class PromptScores:
    """Log-probabilities at temperature 1 of each token but the first, and of the likeliest tokens.

    count: number of likeliest tokens recorded at each position.
    """

    count: int
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)

    def read(
        self,
        logits: Callable[[torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        following: list[int],
    ) -> None:
        """Add a chunk. hidden: last hidden states [T, hidden]; following: the token after each."""
        tokens = torch.tensor(following, device=hidden.device)
        for states, token in zip(hidden.split(ROWS), tokens.split(ROWS), strict=True):
            x = logits(states)
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            x = x - x.logsumexp(-1, keepdim=True)
            self.logprobs += x.gather(1, token[:, None])[:, 0].tolist()
            best = x.topk(min(self.count, x.shape[-1]), dim=-1)
            for ids, logprobs in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                self.top.append([*zip(ids, logprobs, strict=True)])
