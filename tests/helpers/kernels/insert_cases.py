"""Small tables, and random rows to insert into them."""

import torch

from csd.state.context_table import GraphConfig


def config(buckets=4, ways=4, orders=(1, 2, 3), successors=4, **options):
    return GraphConfig(
        orders=orders, capacity=buckets * ways, ways=ways, successors=successors, **options
    )


def random_rows(rng, count, groups=(1,), vocab=4, successors=5, length=3, heavy=1 << 14):
    """(group, context, [(token, weight)], total, bit); some rows are cut, weightless or skipped."""
    rows = []
    for _ in range(count):
        context = [rng.randrange(vocab) for _ in range(length)]
        short = rng.choice([0, 0, 0, 1, length])
        context[length - short :] = [-1] * short
        tokens = rng.sample(range(-1, vocab + 4), successors)
        pairs = [(t, rng.choice([0, rng.randrange(1, heavy)])) for t in tokens]
        total = sum(w for t, w in pairs if t >= 0) + rng.randrange(heavy)
        rows.append((rng.choice([*groups, -1]), context, pairs, total, rng.randrange(64)))
    return rows


def tensors(rows):
    def ints(x):
        return torch.tensor(x, dtype=torch.int32)

    return (
        torch.tensor([r[0] for r in rows]),
        ints([r[1] for r in rows]),
        ints([[t for t, _ in r[2]] for r in rows]),
        ints([[w for _, w in r[2]] for r in rows]),
        ints([r[3] for r in rows]),
        ints([r[4] for r in rows]),
    )
