"""Log-probabilities by the model's own logits, computed only in calls that request them.

`Measures` has the likeliest tokens and the entropy at the positions of samples, `PromptScores` the
log-probabilities of a prompt's own tokens, from the pass that reads it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from csd.kernels.verify.reference_rows import at_least, log_sum_ref, own_chance
from csd.kernels.verify.rules.rows import blocks

# limit of OpenAI's API
MOST_TOP = 20


@dataclass(frozen=True, slots=True)
class Measures:
    """The likeliest tokens and the entropy at each position of a sample, both of the model."""

    top: int = 0  # number of tokens
    entropy: bool = False

    def __bool__(self) -> bool:
        return self.top > 0 or self.entropy

    def of(
        self, logits: torch.Tensor, accept_row: torch.Tensor, static: bool
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Returns integers and floats by name, [S, A, ..]; undefined after the end of a path.

        logits: [R, V] of the model; accept_row: [S, A], its rows on the accepted paths, then -1.
        static: whether the host must not read the device, so that all rows are measured.
        """
        row = accept_row.clamp(min=0).long()
        if not static:
            accepted = accept_row >= 0
            logits = logits[row[accepted]]
            # entries after the end of a path index an arbitrary row
            row = (accepted.flatten().cumsum(0) - 1).clamp(min=0).view_as(row)
        parts = [self.of_rows(logits[rows]) for rows in blocks(logits.shape[0])]
        tokens, values = (
            {name: torch.cat([part[kind][name] for part in parts])[row] for name in parts[0][kind]}
            for kind in (0, 1)
        )
        return tokens, values

    def of_rows(self, x: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Returns integers and floats by name, [R, ..], of rows x [R, V] of the model's logits."""
        tokens, values = {}, {}
        total = log_sum_ref(x)[:, None]
        if self.top:
            token = largest(x, min(self.top, x.shape[1]))
            tokens["likely_token"] = token.int()
            values["likely_logprob"] = x.gather(1, token).to(total.dtype) - total
        if self.entropy:
            logprob = x.to(total.dtype) - total
            chance = logprob.exp()
            # a token of probability 0 adds 0
            values["entropy"] = -chance.mul_(logprob.clamp_(min=-1e4)).sum(-1)
        return tokens, values


def largest(x: torch.Tensor, count: int) -> torch.Tensor:
    """[R, count] int64, tokens of the largest of x [R, V], descending; ties: smaller id first."""
    if x.device.type == "cpu" and not bool(x.isnan().any()):
        token, score = at_least(x, count)
        return token.gather(1, score.sort(dim=-1, descending=True, stable=True).indices[:, :count])
    if x.dtype == torch.float64:
        return x.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    # + 0.0 turns -0.0 into 0.0, since both are equal
    bits = (x.float() + 0.0).view(torch.int32)
    # integers in the order of the floats
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    reversed_id = x.shape[1] - 1 - torch.arange(x.shape[1], device=x.device)
    return x.shape[1] - 1 - ((order.long() << 32) | reversed_id).topk(count).values % (1 << 32)


# rows whose logits are in memory at the same time
ROWS = 64


@dataclass(slots=True)
class PromptScores:
    """Raw log-probabilities of each token but the first, and of the likeliest tokens.

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
