"""What `csd/kernels/verify/` describes, in plain PyTorch."""

import torch

from csd.kernels.noise import REST, SAMPLE, gumbel, philox_words_ref, uniform
from csd.kernels.verify.constants import HEAD_WIDTH, MAX_HEAD
from csd.state.pool import MAX_DEPTH, Pool, joined
from csd.state.slots import Slots
from csd.state.verdict import LENGTH, RUNNING, STOP, TOP, Verdict


def verify_ref(logits: torch.Tensor, pool: Pool, slots: Slots) -> Verdict:
    """Sample at every row and follow the accepted paths.

    logits: [M, V]; 16-bit logits are processed in float32, float64 stays float64.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    live = pool.slot >= 0
    s = pool.slot.clamp(min=0).long()
    position = slots.generated[s] + pool.depth
    greedy = slots.temperature[s] == 0

    x = _penalise(logits, pool, slots, s)
    x = _ban_end_tokens(x, slots, s, position)
    temperature = torch.where(greedy, 1.0, slots.temperature[s]).to(x.dtype)
    z = x / temperature[:, None]
    z = z - z.amax(-1, keepdim=True)
    token, score, rest, rest_mass = _compact(z, slots, s, greedy)
    log_total = (head_sum(score.exp()) + rest_mass).log()

    # [M, heads + 1]: the head, then the rest as token V
    vocab = logits.shape[1]
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
    from_rest = sample == vocab
    if bool(from_rest.any()):
        sample = torch.where(from_rest, _draw_rest(rest, z, slots, s, position), sample)
        z_sample = torch.where(from_rest, z.gather(1, sample[:, None])[:, 0], z_sample)
    logprob = z_sample - log_total

    top_token, top_prob = _likeliest(token, score, log_total, greedy, live)
    sample = torch.where(live, sample, -1)
    accept_row, accept_count, finish = descend(sample, pool, slots)
    raw_logprob, bad = _raw_logprob(logits, sample, accept_row, log_total, pool, slots)
    return Verdict(
        sample=sample.int(),
        logprob=torch.where(live, torch.where(greedy, raw_logprob, logprob), 0),
        raw_logprob=raw_logprob,
        top_token=top_token.int(),
        top_prob=top_prob,
        accept_row=accept_row,
        accept_count=accept_count,
        finish=finish,
        bad=bad,
    )


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sums over the vocabulary, of x [M, V]. The order of a row's does not depend on the others.

    A row alone is added up by several threads, each a part of it; two rows never are.
    """
    if x.shape[0] == 1:
        return x.expand(2, -1).sum(-1)[:1]
    return x.sum(-1)


def head_sum(x: torch.Tensor) -> torch.Tensor:
    """Sums of x [M, W], one after another: W is the longest row's, zeros at the end are free."""
    return x.cumsum(-1)[:, -1]


def _penalise(logits: torch.Tensor, pool: Pool, slots: Slots, s: torch.Tensor) -> torch.Tensor:
    """Repetition penalty over prompt, sample and the row's own path."""
    if bool((slots.penalty == 1).all()):
        return logits
    vocab = logits.shape[1]
    bit = torch.arange(32, device=logits.device)
    seen = ((slots.seen[s][:, :, None] >> bit) & 1).flatten(1)[:, :vocab].bool()
    # [M, M]: column j is on the path of row m
    node = torch.arange(pool.rows, device=logits.device) - _slot_start(pool)
    same = (pool.slot[:, None] == pool.slot[None, :]) & (pool.slot[:, None] >= 0)
    on_path = same & (((pool.ancestors[:, None] >> node.clamp(0, 63)[None, :]) & 1) == 1)
    m, j = on_path.nonzero(as_tuple=True)
    seen[m, pool.token[j].long()] = True
    penalty = slots.penalty[s].to(logits.dtype)[:, None]
    return torch.where(
        seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits
    )


def _slot_start(pool: Pool) -> torch.Tensor:
    """First row of each row's slot, [M]."""
    return pool.slot_start[pool.slot.clamp(min=0).long()]


def _ban_end_tokens(
    x: torch.Tensor, slots: Slots, s: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """End tokens cannot be sampled before `min_new` tokens."""
    early = position < slots.min_new[s]
    if not bool(early.any()):
        return x
    ban = slots.ban_ids[s].long()
    hit = (ban >= 0) & early[:, None]
    m = torch.arange(x.shape[0], device=x.device)[:, None].expand_as(ban)
    x = x.clone()
    x[m[hit], ban[hit]] = -torch.inf
    return x


def _compact(
    z: torch.Tensor, slots: Slots, s: torch.Tensor, greedy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Head of every row after the filters, in token order, and what the filters leave beside it.

    z: [M, V], 0 at a row's maximum. Returns token [M, W] (V in padding), score [M, W] (-inf in
    padding), the rest as a mask [M, V] and its mass [M]; W is the longest head.
    """
    vocab = z.shape[1]
    top_k = slots.top_k[s]
    # filters could only choose among equals of a greedy row
    top_k = torch.where((top_k > 0) & (top_k < vocab) & ~greedy, top_k, 0)
    head = z >= -HEAD_WIDTH
    keep = z > -torch.inf
    if bool((top_k > 0).any()):
        largest = z.topk(int(top_k.max()), dim=-1).values
        kth = largest.gather(1, (top_k.long() - 1).clamp(min=0)[:, None])
        keep &= (z >= kth) | (top_k == 0)[:, None]
        head = keep & (head | ((top_k > 0) & (top_k <= MAX_HEAD))[:, None])
    rest = keep & ~head
    # kept tokens outside the head are summed directly: a difference of sums would be rounding
    mass = z.exp()
    rest_mass = row_sum(torch.where(rest, mass, 0))
    token, score = _gather_head(z, head)

    top_p = torch.where(greedy, 1, slots.top_p[s]).to(z.dtype)
    if bool((top_p < 1).any()):
        score, rest, rest_mass = _top_p(z, token, score, rest, rest_mass, top_p)
    min_p = torch.where(greedy, 0, slots.min_p[s]).to(z.dtype)[:, None]
    if bool((min_p > 0).any()):
        score = torch.where(score.exp() >= min_p, score, -torch.inf)
        rest = rest & (mass >= min_p)
        rest_mass = row_sum(torch.where(rest, mass, 0))
    return token, score, rest, rest_mass


def _gather_head(z: torch.Tensor, head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    count = head.sum(-1)
    shape = (z.shape[0], max(int(count.max()), 1))
    m, t = head.nonzero(as_tuple=True)
    place = torch.arange(m.shape[0], device=z.device) - (count.cumsum(0) - count)[m]
    token = torch.full(shape, z.shape[1], device=z.device)
    score = torch.full(shape, -torch.inf, dtype=z.dtype, device=z.device)
    token[m, place] = t
    score[m, place] = z[m, t]
    return token, score


def _top_p(
    z: torch.Tensor,
    token: torch.Tensor,
    score: torch.Tensor,
    rest: torch.Tensor,
    rest_mass: torch.Tensor,
    top_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Drop what lies in the lower tail of mass 1 - top_p.

    A token goes when the mass up to and including it, in ascending order, is at most 1 - top_p.
    Equal values ascend in token order, as in a stable sort. The cut usually falls into the head;
    a row where it falls below sorts the whole row.
    """
    tail = 1 - top_p
    total = head_sum(score.exp()) + rest_mass
    ascending, order = score.sort(dim=-1, stable=True)
    below = (rest_mass[:, None] + ascending.exp().cumsum(-1)) / total[:, None]
    kept = below > tail[:, None]
    kept[:, -1] = True
    kept = torch.zeros_like(kept).scatter_(1, order, kept) | (top_p >= 1)[:, None]
    score = torch.where(kept, score, -torch.inf)

    deep = (rest_mass / total > tail) & (top_p < 1)
    shallow = (top_p < 1) & ~deep
    rest = rest & ~shallow[:, None]
    if bool(deep.any()):
        row = deep.nonzero()[:, 0]
        z_row = torch.where(rest[row], z[row], -torch.inf)
        ascending, order = z_row.sort(dim=-1, stable=True)
        below = ascending.exp().cumsum(-1) / total[row, None]
        kept = torch.zeros_like(rest[row]).scatter_(1, order, below > tail[row, None])
        rest = rest.index_put((row,), rest[row] & kept)
    return score, rest, row_sum(torch.where(rest, z.exp(), 0))


def _draw_rest(
    rest: torch.Tensor, z: torch.Tensor, slots: Slots, s: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """A token of the rest by inverse CDF in token order, clamped to its last token."""
    cdf = torch.where(rest, z.exp(), 0).cumsum(-1)
    word = philox_words_ref(
        slots.key[s], torch.zeros_like(position), position, slots.sample[s], REST
    )
    target = uniform(word, z.dtype)[:, None] * cdf[:, -1:]
    token = (cdf <= target).sum(-1)
    ids = torch.arange(z.shape[1], device=z.device)
    return token.minimum(torch.where(rest, ids, 0).amax(-1))


def _likeliest(
    token: torch.Tensor,
    score: torch.Tensor,
    log_total: torch.Tensor,
    greedy: torch.Tensor,
    live: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top 8 of the processed distribution; of a greedy row, the one token it takes."""
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


def descend(
    sample: torch.Tensor, pool: Pool, slots: Slots
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accepted path of every slot, cut by its stop rules."""
    device = sample.device
    n_slots = slots.count
    s = pool.slot.clamp(min=0).long()
    parent = pool.parent.clamp(min=0).long()
    accepted = joined(pool, (pool.parent < 0) | (sample[parent] == pool.token))

    width = MAX_DEPTH + 1
    # rows that are not accepted write to a place of their own behind the table
    place = torch.where(accepted, s * width + pool.depth, n_slots * width)
    table = torch.full((n_slots * width + 1,), -1, dtype=torch.int32, device=device)
    rows = torch.arange(pool.rows, dtype=torch.int32, device=device)
    accept_row = table.scatter_(0, place, rows)[:-1].view(n_slots, width)

    path = torch.where(accept_row >= 0, sample[accept_row.clamp(min=0).long()], -1)
    ended = ((path[:, :, None] == slots.stop_ids[:, None, :]) & (path[:, :, None] >= 0)).any(-1)
    ever = ended.any(-1)
    until_end = torch.where(ever, ended.int().argmax(-1) + 1, width)
    count = (accept_row >= 0).sum(-1)
    left = slots.max_new - slots.generated
    kept = torch.minimum(torch.minimum(count, until_end), left).clamp(min=0)
    finish = torch.where(kept == left, LENGTH, RUNNING)
    finish = torch.where(ever & (until_end <= kept), STOP, finish)
    in_flight = pool.slot_nodes > 0
    kept = torch.where(in_flight, kept, 0).int()
    finish = torch.where(in_flight, finish, RUNNING).int()
    places = torch.arange(width, device=device)
    return torch.where(places < kept[:, None], accept_row, -1), kept, finish


def _raw_logprob(
    logits: torch.Tensor,
    sample: torch.Tensor,
    accept_row: torch.Tensor,
    log_total: torch.Tensor,
    pool: Pool,
    slots: Slots,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of the committed samples at temperature 1, and which slots went bad."""
    rows = accept_row[accept_row >= 0].long()
    raw = torch.zeros(logits.shape[0], dtype=logits.dtype, device=logits.device)
    chosen = logits[rows]
    most = chosen.amax(-1)
    log_sum = row_sum((chosen - most[:, None]).exp_()).log() + most
    raw[rows] = chosen.gather(1, sample[rows].long()[:, None])[:, 0] - log_sum
    live = pool.slot >= 0
    broken = live & ~log_total.isfinite()
    bad = torch.zeros(slots.count, dtype=torch.int32, device=logits.device)
    bad.index_add_(0, pool.slot.clamp(min=0).long(), broken.int())
    return raw, bad > 0
