"""The consensus graph as tensors: a hash table from contexts to weighted successors.

A context is the last n tokens of a group's text, for the orders n of the configuration. The table
is a set of buckets of WAYS entries; a context can live in any entry of its bucket, so a look-up
reads one bucket. Weights are fixed point, probability * 2^16, so sums do not depend on order.
"""

from dataclasses import dataclass

import torch

WAYS = 16
ONE = 1 << 16
# a total past this is halved, with all its weights
MAX_TOTAL = 1 << 30
# of succ_source: bit b says that a sample with index b modulo 62 went this way
PROMPT_BIT = 62
SAMPLE_BITS = 62


@dataclass(frozen=True, slots=True)
class GraphConfig:
    """How contexts are kept and turned into probabilities."""

    orders: tuple[int, ...] = (1, 2, 3, 4)  # ascending
    capacity: int = 1 << 16  # contexts, a power of two
    successors: int = 8  # kept for a context
    soft: float = 1.0  # weight of the target's probabilities at a verified node
    hard: float = 0.5  # weight of a committed token
    prompt: float = 1.0  # weight of a prompt's token
    confidence: float = 0.5  # lam = W / (W + confidence)
    beta: float = 0.6  # sharpness of the coupled noise
    width: int = 16  # nodes of a slot that are extended at each depth
    max_depth: int = 16

    @property
    def context(self) -> int:
        return max(self.orders)


@dataclass(slots=True)
class Table:
    """C contexts of at most N tokens, E successors each."""

    group: torch.Tensor  # [C] int64, the group's never-reused key, -1 when empty
    hash: torch.Tensor  # [C] int64
    tokens: torch.Tensor  # [C, N] int32, latest first, -1 beyond the context's order
    total: torch.Tensor  # [C] int32, weight seen, successors that were dropped included
    stamp: torch.Tensor  # [C] int32, the insert that last touched it
    succ_token: torch.Tensor  # [C, E] int32, -1 when absent
    succ_weight: torch.Tensor  # [C, E] int32
    succ_source: torch.Tensor  # [C, E] int64, who went this way

    @classmethod
    def empty(cls, config: GraphConfig, device="cpu") -> "Table":
        C, N, E = config.capacity, config.context, config.successors

        def full(shape, value, dtype=torch.int32):
            return torch.full(shape, value, dtype=dtype, device=device)

        return cls(
            group=full((C,), -1, torch.int64),
            hash=full((C,), 0, torch.int64),
            tokens=full((C, N), -1),
            total=full((C,), 0),
            stamp=full((C,), 0),
            succ_token=full((C, E), -1),
            succ_weight=full((C, E), 0),
            succ_source=full((C, E), 0, torch.int64),
        )


def mix(x: torch.Tensor) -> torch.Tensor:
    """Finaliser of splitmix64 on int64 tensors."""
    x = x + -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def context_hashes(
    group: torch.Tensor,  # [..] int64
    context: torch.Tensor,  # [.., N] int32, latest first, -1 before the start
    orders: tuple[int, ...],
) -> torch.Tensor:
    """Hash of each context at every order, [.., orders]: group, then tokens, latest first."""
    h = mix(group)
    hashes = []
    for n, token in enumerate(context.long().unbind(-1), 1):
        h = mix(h ^ token)
        if n in orders:
            hashes.append(h)
    return torch.stack(hashes, -1)


def find(
    table: Table,
    group: torch.Tensor,  # [..] int64
    context: torch.Tensor,  # [.., N] int32
    hashes: torch.Tensor,  # [.., orders] int64
    orders: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Entry of each context [.., orders], -1 where there is none; its bucket; whether its hash is
    taken. Of two contexts with one 64-bit hash the table holds one."""
    buckets = table.group.shape[0] // WAYS
    bucket = hashes & (buckets - 1)
    # [.., orders, WAYS]
    same = table.hash.view(buckets, WAYS)[bucket] == hashes[..., None]
    same &= table.group.view(buckets, WAYS)[bucket] == group[..., None, None]
    hit = same.any(-1)
    entry = bucket * WAYS + same.int().argmax(-1)
    order = torch.tensor(orders, device=context.device)
    place = torch.arange(context.shape[-1], device=context.device)
    key = torch.where(place < order[:, None], context[..., None, :], -1)
    equal = (table.tokens[entry] == key).all(-1)
    return torch.where(hit & equal, entry, -1), bucket, hit
