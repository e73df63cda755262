"""Log-probabilities of a prompt's own tokens, from the pass that reads it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from csd.engine.top_logprobs import Measures
from csd.kernels.verify.rules import own_chance

# rows whose logits are in memory at the same time
ROWS = 64


@dataclass(slots=True)
class PromptScores:
    """Log-probabilities at temperature 1 of each token but the first, and of the likeliest tokens.

    count: number of likeliest tokens recorded at each position.
    """

    count: int = 0
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
            self.logprobs += own_chance(x, token).tolist()
            if not self.count:
                self.top += [[] for _ in range(x.shape[0])]
                continue
            ids, values = Measures(self.count).of_rows(x)
            listed = ids["likely_token"].tolist(), values["likely_logprob"].tolist()
            self.top += [[*zip(*pair, strict=True)] for pair in zip(*listed, strict=True)]
