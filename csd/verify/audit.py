"""Audit of recorded tokens: distance of each from the token that its noise draws.

Under `match` a token is a function of model, prompt, seed, sample index and the tokens before it,
so one row of logits is enough to check a claimed token. At every row of the recorded tokens, with s
the perturbed score of an atom (`csd.kernels.verify`):

    gap = s(drawn token) - s(recorded token)         0 where they are the same token
        = distance of the noise from the token's part of the tail's mass, if both are in the tail
        = inf if the recorded token has no probability, or no token is left

In greedy rows scores are logits, after penalties and bans. Rounding moves scores by as much as it
moves logits, so a small gap is a tie, and a large one shows other weights, settings or tokens.
"""

import math
from collections.abc import Mapping

import torch

from csd.kernels.common.noise import REST, SAMPLE, gumbel, philox_words_ref, uniform
from csd.kernels.ops import Ops
from csd.kernels.verify.reference_rows import row_logits, row_scores
from csd.kernels.verify.token_logprobs import no_token
from csd.state.filters import is_greedy
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import Verdict
from csd.verify.teacher_forcing import TeacherForcing


class Auditor(TeacherForcing):
    """`TeacherForcing` that records `gaps`, a list per sample, by its noise key and index."""

    def __init__(self, tokens: Mapping[tuple[int, int], list[int]], ops: Ops, rows: int):
        super().__init__(tokens, ops, rows)
        self.gaps: dict[tuple[int, int], list[float]] = {key: [] for key in tokens}

    def verify(self, logits: torch.Tensor, pool: Pool, slots: Slots) -> Verdict:
        forced = super().verify(logits, pool, slots)
        none = no_token(logits)
        logits = logits.masked_fill(none[:, None], 0)
        drawn = self._ops.verify_all(logits, pool, slots).sample
        # rows of a slot are in the order of its tokens
        keys, samples = slots.key.tolist(), slots.sample.tolist()
        gaps = torch.zeros(pool.rows, dtype=torch.float64)
        for row in (drawn != forced.sample).nonzero()[:, 0].tolist():
            pair = int(drawn[row]), int(forced.sample[row])
            gaps[row] = _gap(row, *pair, logits, pool, slots)
        gaps[none.cpu()] = math.inf
        for s, gap in zip(pool.slot.tolist(), gaps.tolist(), strict=True):
            self.gaps[keys[s], samples[s]].append(gap)
        return forced


def _gap(
    row: int, drawn: int, recorded: int, logits: torch.Tensor, pool: Pool, slots: Slots
) -> float:
    s, rows = int(pool.slot[row]), torch.tensor([row], device=logits.device)
    if is_greedy(slots, pool.slot[rows].long()):
        x = row_logits(logits[rows], rows, pool, slots)[0].double()
        return float(x[drawn] - x[recorded])
    _, heads, rests = row_scores(logits[rows], rows, pool, slots)
    listed = zip(heads.token[0].tolist(), heads.score[0].double().tolist(), strict=True)
    head = {token: score for token, score in listed if score > -math.inf}
    rest, vocab = rests[0].double(), logits.shape[1]
    if recorded not in head and rest[recorded] == 0:
        return math.inf
    position = slots.generated[s] + pool.depth[row]

    def word(token: int, stream: int) -> torch.Tensor:
        tokens = torch.tensor(token, device=rest.device)
        return philox_words_ref(slots.key[s], tokens, position, slots.sample[s], stream)

    def score(token: int) -> float:
        mass = head.get(token, float(rest.sum().log()))
        return mass + float(gumbel(word(token if token in head else vocab, SAMPLE), torch.float64))

    if drawn in head or recorded in head:
        return max(score(drawn) - score(recorded), 0.0)
    share = rest.cumsum(0) / rest.sum()
    threshold = float(uniform(word(0, REST), torch.float64))
    begin, end = float(share[recorded] - rest[recorded] / rest.sum()), float(share[recorded])
    return max(begin - threshold, threshold - end, 0.0)
