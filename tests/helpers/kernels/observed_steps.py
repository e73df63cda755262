"""Steps whose verdicts are written out, for `observe` and the inserts behind it."""

import torch

from csd.state.pool import MAX_DEPTH, Pool
from csd.state.slots import Slots
from csd.state.verdict import TOP, Verdict

ONE, HALF = 1 << 16, 1 << 15


def verdict_of(sample, top_token, top_prob, accept_row):
    """A verdict of which only this is read."""
    M, S = len(sample), len(accept_row)
    pad = TOP - top_token.shape[1]
    return Verdict(
        sample=sample.int(),
        logprob=torch.full((M,), torch.nan),
        raw_logprob=torch.full((M,), torch.nan),
        top_token=torch.nn.functional.pad(top_token.int(), (0, pad), value=-1),
        top_prob=torch.nn.functional.pad(top_prob.float(), (0, pad)),
        accept_row=accept_row.int(),
        accept_count=(accept_row >= 0).sum(1).int(),
        finish=torch.zeros(S, dtype=torch.int32),
        bad=torch.zeros(S, dtype=torch.bool),
    )


def no_path(slots):
    return torch.full((slots, MAX_DEPTH + 1), -1)


def random_step(M, S, N, seed):
    """Slots in three groups, nodes anywhere, paths that may hold them, ties of rounding."""
    generator = torch.Generator().manual_seed(seed)

    def ints(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator).int()

    slots = Slots.empty(S, 100, 20, N)
    slots.group.copy_(ints(-1, min(S, 3), S))
    slots.sample.copy_(ints(0, 1000, S))
    slots.step.copy_(ints(0, 50, S))
    slots.group_key.copy_(torch.randint(-1, 1 << 62, (S,), generator=generator))
    pool = Pool.empty(M, S, S, N)
    pool.slot.copy_(ints(-1, S, M))
    pool.depth.copy_(torch.where(pool.slot >= 0, ints(0, MAX_DEPTH + 1, M), 0))
    pool.context.copy_(ints(-1, 100, M, N))
    path = no_path(S)
    for s in range(S):
        own = (pool.slot == s).nonzero()[:, 0].tolist()
        for depth in range(MAX_DEPTH + 1):
            here = [r for r in own if pool.depth[r] == depth]
            path[s, depth] = here[0] if here else -1
    # halves of the last bit too
    prob = ints(0, 1 << 18, M, TOP).double() / (1 << 18) * (ints(0, 3, M, 1) > 0)
    sample = ints(0, 6, M)
    token = torch.stack([torch.randperm(12, generator=generator)[:TOP] for _ in range(M)])
    return pool, slots, verdict_of(sample, token, prob, path)
