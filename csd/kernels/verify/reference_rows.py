"""The part of `verify_ref` that computes each row by itself.

Penalties and filters give a row's head and rest, from which its token and its likeliest tokens are
drawn.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from csd.kernels.common.noise import REST, SAMPLE, gumbel, philox_words_ref, uniform
from csd.kernels.verify.constants import HEAD_WIDTH, MAX_HEAD
from csd.state.filters import is_greedy
from csd.state.pool import Pool, on_path
from csd.state.slots import Slots
from csd.state.verdict import TOP

# tokens per piece of a row
PIECE = 64


class Heads(NamedTuple):
    """Heads of rows of scores z, 0 at a row's maximum: tokens with large z, and the others' mass.

    W is the longest head.
    """

    token: torch.Tensor  # [R, W] in ascending order, V in padding
    score: torch.Tensor  # [R, W] their z, -inf in padding
    rest_mass: torch.Tensor  # [R] sum of exp(z) of the others that the filters keep


class Draws(NamedTuple):
    """Draws of R rows, each independent of the others."""

    token: torch.Tensor  # [R] int64
    logprob: torch.Tensor  # [R] of the token
    log_total: torch.Tensor  # [R] log of the row's mass after the filters
    top_token: torch.Tensor  # [R, 8] int64, the likeliest tokens
    top_prob: torch.Tensor  # [R, 8] float32


def draw_ref(
    heads: Heads,
    s: torch.Tensor,  # [R] int64, the row's slot, 0 in padding
    position: torch.Tensor,  # [R] generated position of the token that is drawn
    greedy: torch.Tensor,  # [R] bool
    live: torch.Tensor,  # [R] bool, false in padding
    slots: Slots,
    vocab: int,
) -> Draws:
    """Draws by the Gumbel maximum, a row's rest being token `vocab`; with the head's likeliest."""
    token, score, rest_mass = heads
    log_total = (head_sum(score.exp()) + rest_mass).log()
    # [R, heads + 1]: the head, then the rest
    atoms = torch.cat([token, torch.full_like(token[:, :1], vocab)], dim=1)
    mass = torch.cat([score, rest_mass.log()[:, None]], dim=1)
    word = philox_words_ref(
        slots.key[s][:, None], atoms, position[:, None], slots.sample[s][:, None], SAMPLE
    )
    noisy = torch.where(greedy[:, None], mass, mass + gumbel(word, mass.dtype))
    noisy[:, -1].masked_fill_(greedy, -torch.inf)
    # heads are in token order: the first maximum has the smallest id
    winner = (noisy == noisy.amax(-1, keepdim=True)).int().argmax(-1)
    sample = atoms.gather(1, winner[:, None])[:, 0]
    z_sample = mass.gather(1, winner[:, None])[:, 0]
    likeliest = _likeliest(heads, log_total, greedy, live)
    return Draws(sample, z_sample - log_total, log_total, *likeliest)


def head_sum(x: torch.Tensor) -> torch.Tensor:
    """Sums [M] of x [M, W], added in order, so that zeros at a row's end do not change the bits."""
    return x.cumsum(-1)[:, -1]


def draw_rest(
    rest: torch.Tensor, slots: Slots, s: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """Draws a token of the rest [R, V] by inverse CDF in token order, clamped to its last token."""
    cdf = rest.cumsum(-1)
    word = philox_words_ref(
        slots.key[s], torch.zeros_like(position), position, slots.sample[s], REST
    )
    target = uniform(word, rest.dtype)[:, None] * cdf[:, -1:]
    token = (cdf <= target).sum(-1)
    ids = torch.arange(rest.shape[1], device=rest.device)
    return token.minimum(torch.where(rest > 0, ids, 0).amax(-1))


def _likeliest(
    heads: Heads, log_total: torch.Tensor, greedy: torch.Tensor, live: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top 8 tokens and probabilities after the filters; for a greedy row, only the token drawn."""
    token, score, _ = heads
    width = min(TOP, token.shape[1])
    # stable: equal scores stay in token order
    top, order = score.sort(dim=-1, descending=True, stable=True)
    pad = (0, TOP - width)
    top_token = torch.nn.functional.pad(token.gather(1, order[:, :width]), pad, value=-1)
    top_prob = (top[:, :width] - log_total[:, None]).exp().float()
    top_prob = torch.nn.functional.pad(top_prob, pad)
    one_hot = (torch.arange(TOP, device=token.device) == 0).to(top_prob.dtype)
    top_prob = torch.where(greedy[:, None], one_hot, top_prob)
    present = (top_prob > 0) & live[:, None]
    return torch.where(present, top_token, -1), torch.where(present, top_prob, 0)


def sample_rows(logits: torch.Tensor, rows: torch.Tensor, pool: Pool, slots: Slots) -> Draws:
    """Draws of the pool's `rows` [R], with the logits [R, V]."""
    s, live = pool.slot[rows].clamp(min=0).long(), pool.slot[rows] >= 0
    position = slots.generated[s] + pool.depth[rows]
    heads = row_scores(logits, rows, pool, slots)[1]
    drawn = draw_ref(heads, s, position, is_greedy(slots, s), live, slots, logits.shape[1])
    of = (drawn.token == logits.shape[1]).nonzero()[:, 0]
    if of.shape[0]:
        z, _, rest = row_scores(logits[of], rows[of], pool, slots)
        drawn.token[of] = token = draw_rest(rest, slots, s[of], position[of])
        drawn.logprob[of] = z.gather(1, token[:, None])[:, 0] - drawn.log_total[of]
    return drawn


def row_scores(
    logits: torch.Tensor, rows: torch.Tensor, pool: Pool, slots: Slots
) -> tuple[torch.Tensor, Heads, torch.Tensor]:
    """Scores z [R, V] of the pool's `rows`, their heads, and exp(z) of the rest [R, V], else 0."""
    s = pool.slot[rows].clamp(min=0).long()
    greedy, x = is_greedy(slots, s), row_logits(logits, rows, pool, slots)
    dtype = torch.promote_types(x.dtype, torch.float32)
    temperature = torch.where(greedy, 1.0, slots.temperature[s]).to(dtype)
    return heads_and_rest(x, temperature, slots, s, greedy)


def row_logits(logits: torch.Tensor, rows: torch.Tensor, pool: Pool, slots: Slots) -> torch.Tensor:
    """The logits [R, V] that the pool's `rows` [R] sample from, before temperature."""
    s = pool.slot[rows].clamp(min=0).long()
    if bool((slots.repetition_penalty != 1).any()):
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        path = torch.where(on_path(pool, rows), pool.token.long(), -1)
        logits = penalise(wide, path, s, slots)
    early = slots.generated[s] + pool.depth[rows] < slots.min_new[s]
    if bool(early.any()):
        ban = slots.ban_ids[s].long()
        m, i = ((ban >= 0) & early[:, None]).nonzero(as_tuple=True)
        logits = logits.clone()
        logits[m, ban[m, i]] = -torch.inf
    return logits


def heads_and_rest(
    x: torch.Tensor, temperature: torch.Tensor, slots: Slots, s: torch.Tensor, greedy: torch.Tensor
) -> tuple[torch.Tensor, Heads, torch.Tensor]:
    """z [R, V], the heads, and exp(z) of the rest [R, V], 0 elsewhere."""
    z = x.to(temperature.dtype) / temperature[:, None]
    # [R, V / PIECE]: maxima of pieces of a row, few of which have tokens of its head
    pieces = z.unflatten(1, (-1, math.gcd(z.shape[1], PIECE))).amax(-1)
    peak = pieces.amax(-1, keepdim=True)
    z, pieces = z.sub_(peak), pieces.sub_(peak)
    top_k = slots.top_k[s]
    # in a greedy row filters could only choose among equal tokens
    top_k = torch.where((top_k > 0) & (top_k < z.shape[1]) & ~greedy, top_k, 0)[:, None]
    # [R, 1] smallest score of the head; comparisons with numbers, not masks, for their speed
    low = torch.full_like(z[:, :1], -HEAD_WIDTH)
    # kept tokens outside the head are summed directly: a difference of sums would be rounding
    rest = z.exp()
    if bool((top_k > 0).any()):
        largest = z.topk(int(top_k.max()), dim=-1).values
        kth = largest.gather(1, (top_k.long() - 1).clamp(min=0))
        kth = torch.where(top_k > 0, kth, -torch.inf)
        rest *= torch.ge(z, kth, out=torch.empty_like(z))
        low = torch.where((top_k > 0) & (top_k <= MAX_HEAD), kth, torch.maximum(low, kth))
    low = low.clamp(min=torch.finfo(z.dtype).min)
    m, t = _find_head(z, pieces, low)
    rest[m, t] = 0
    rest_mass = row_sum(rest)
    token, score = _line_up(z, m, t)

    top_p = torch.where(greedy, 1, slots.top_p[s]).to(z.dtype)
    if bool((top_p < 1).any()):
        score, rest, rest_mass = _top_p(score, rest, rest_mass, top_p)
    min_p = torch.where(greedy, 0, slots.min_p[s]).to(z.dtype)[:, None]
    if bool((min_p > 0).any()):
        score = torch.where(score.exp() >= min_p, score, -torch.inf)
        rest = rest.masked_fill_(rest < min_p, 0)
        rest_mass = row_sum(rest)
    typical_p = torch.where(greedy, 1, slots.typical_p[s]).to(z.dtype)
    if bool((typical_p < 1).any()):
        score, rest = _typical(token, score, z, rest, typical_p)
        rest_mass = row_sum(rest)
    return z, Heads(token, score, rest_mass), rest


def log_sum_ref(x: torch.Tensor) -> torch.Tensor:
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    peak = x.amax(-1)
    return row_sum((x - peak[:, None]).exp_()).log() + peak


def own_chance(
    logits: torch.Tensor, token: torch.Tensor, log_sum: Callable = log_sum_ref
) -> torch.Tensor:
    """Log-probabilities [R] of token [R] by logits [R, V], at least float32.

    log_sum: the backend's, so that the bits equal those of its sampling.
    """
    total = log_sum(logits)
    logit = logits.gather(1, token.clamp(min=0).long()[:, None])[:, 0]
    return logit.to(total.dtype) - total


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sums [M] of x [M, V] over the vocabulary, in an order that does not depend on other rows.

    PyTorch splits a single row among several threads, but never a row of two, so one is doubled.
    """
    if x.shape[0] == 1:
        return x.expand(2, -1).sum(-1)[:1]
    return x.sum(-1)


def penalise(x: torch.Tensor, path: torch.Tensor, s: torch.Tensor, slots: Slots) -> torch.Tensor:
    """Returns rows x [R, V] of slots s [R] with the repetition penalty; path: [R, D].

    A slot's bitmap `seen` has the tokens of its prompt and sample.
    """
    vocab = x.shape[1]
    bit = torch.arange(32, device=x.device)
    bits = ((slots.seen[s][:, :, None] >> bit) & 1).flatten(1)[:, :vocab].bool()
    seen = torch.nn.functional.pad(bits, (0, 1))
    seen.scatter_(1, torch.where(path >= 0, path, vocab), True)
    penalty = slots.repetition_penalty[s].to(x.dtype)[:, None]
    # a slot without a penalty stores no bits, and a penalty of 1 changes nothing
    scaled = torch.where(x < 0, x * penalty, x / penalty)
    return torch.where(seen[:, :vocab] & (penalty != 1), scaled, x)


def _find_head(
    z: torch.Tensor, pieces: torch.Tensor, low: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and token of every z >= low [R, 1], in order."""
    width = z.shape[1] // pieces.shape[1]
    m, piece = (pieces >= low).nonzero(as_tuple=True)
    values = z.unflatten(1, (-1, width))[m, piece]
    i, column = (values >= low[m]).nonzero(as_tuple=True)
    return m[i], piece[i] * width + column


def at_least(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [R, W] and logits of x [R, V] among which are the `count` largest, in token order."""
    pieces = x.unflatten(1, (-1, math.gcd(x.shape[1], PIECE))).amax(-1)
    low = torch.full_like(x[:, :1], -torch.inf)
    if pieces.shape[1] >= count:
        low = pieces.topk(count).values[:, -1:]
    return _line_up(x, *_find_head(x, pieces, low))


def _line_up(
    z: torch.Tensor, m: torch.Tensor, t: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token and score [R, W] of the heads, from tokens t in rows m."""
    count = torch.zeros_like(z[:, 0], dtype=torch.long).index_add_(0, m, torch.ones_like(m))
    column = torch.arange(m.shape[0], device=z.device) - (count.cumsum(0) - count)[m]
    shape = (z.shape[0], max(int(count.max()), 1))
    token = torch.full(shape, z.shape[1], device=z.device)
    score = torch.full(shape, -torch.inf, dtype=z.dtype, device=z.device)
    token[m, column] = t
    score[m, column] = z[m, t]
    return token, score


def _top_p(
    score: torch.Tensor, rest: torch.Tensor, rest_mass: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Drops the tokens in the lower tail of mass 1 - top_p; returns score, rest and rest_mass.

    A token is dropped if the mass up to and including it, in ascending order, is at most 1 - top_p.
    Equal values ascend in token order, as in a stable sort. The cut usually falls into the head;
    if it falls below, the whole row is sorted.
    """
    tail = 1 - top_p
    total = head_sum(score.exp()) + rest_mass
    ascending, order = score.sort(dim=-1, stable=True)
    below = (rest_mass[:, None] + ascending.exp().cumsum(-1)) / total[:, None]
    passes = below > tail[:, None]
    passes[:, -1] = True
    passes = torch.zeros_like(passes).scatter_(1, order, passes) | (top_p >= 1)[:, None]
    score = torch.where(passes, score, -torch.inf)

    deep = (rest_mass / total > tail) & (top_p < 1)
    shallow = (top_p < 1) & ~deep
    rest = rest.masked_fill_(shallow[:, None], 0)
    if bool(deep.any()):
        row = deep.nonzero()[:, 0]
        ascending, order = rest[row].sort(dim=-1, stable=True)
        below = ascending.cumsum(-1) / total[row, None]
        passes = torch.zeros(below.shape, dtype=torch.bool, device=rest.device)
        passes.scatter_(1, order, below > tail[row, None])
        rest = rest.index_put((row,), rest[row] * passes)
    return score, rest, row_sum(rest)


def _typical(
    token: torch.Tensor,
    score: torch.Tensor,
    z: torch.Tensor,
    rest: torch.Tensor,
    typical_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drops the tokens whose surprise is far from the row's entropy; returns score and rest.

    With d = -z >= 0 a token's surprise is d + log(sum exp(-d)), and the entropy is the mean of it,
    so their difference is |d - mean d|. The tokens with the smallest differences are kept, up to
    the first at which their mass reaches typical_p, and those tied with it. They usually lie in
    the head; if the head has too little mass nearer than the rest, the whole row is sorted.
    """
    head = score.exp()
    total = head_sum(head) + row_sum(rest)
    distance = torch.where(rest > 0, -z, 0)
    mean = head_sum(torch.where(head > 0, head * -score, 0)) + row_sum(rest * distance)
    mean = (mean / total)[:, None]
    target = (typical_p * total)[:, None]
    shift = torch.where(head > 0, (score + mean).abs(), torch.inf)
    reach = _reach(shift, head, target)

    filtered = typical_p < 1
    near = head_sum(torch.where(shift <= HEAD_WIDTH - mean, head, 0))[:, None]
    deep = filtered & ((near < target)[:, 0] & (rest > 0).any(-1))
    rest = rest.masked_fill((filtered & ~deep)[:, None], 0)
    if bool(deep.any()):
        row = deep.nonzero()[:, 0]
        # the last column takes the padding of heads
        mass = torch.cat([rest[row], torch.zeros_like(rest[row, :1])], dim=1)
        mass = mass.scatter_(1, token[row], head[row])[:, :-1]
        shifts = torch.where(mass > 0, (z[row] + mean[row]).abs(), torch.inf)
        reach[row] = _reach(shifts, mass, target[row])
        rest = rest.index_put((row,), rest[row] * (shifts <= reach[row]))
    kept = (shift <= reach) | ~filtered[:, None]
    return torch.where(kept, score, -torch.inf), rest


def _reach(shift: torch.Tensor, mass: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """[R, 1] smallest shift up to which tokens [R, W] have a mass of at least target [R, 1]."""
    ascending, order = shift.sort(dim=-1, stable=True)
    short = (mass.gather(1, order).cumsum(-1) < target).sum(-1, keepdim=True)
    return ascending.gather(1, short.clamp(max=shift.shape[1] - 1))
