"""The consensus graph's tensors: a set-associative hash table of contexts.

A context is the last n tokens of a sample in one group. Its entry is one of the WAYS adjacent
entries of the bucket that its hash selects; a lookup reads only one bucket. An entry is alive
while its group is in flight: the entries of a freed group can be replaced by others.

A group's table may have another one behind it, the **prior**: contexts of answers to other prompts,
which belong to no group (their key is PRIOR_KEY). All groups read it, and no step writes it. It
may have several parts, tables of equal sizes one after another, of which a group reads only its own
(`Slots.prior_part`): so one owner's answers draft for no other's prompts.

Weights are fixed point, with WEIGHT_ONE for a count or a probability of one, so sums are exact in
any order. A context's total counts every observation of it; the part of the total that its
successors' weights leave was observed on other tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from csd.state.pool import COST_ONE, MAX_GROUP_PENALTY
from csd.state.record import allocate, declared, tensor

WEIGHT_ONE = 1 << 16
# a context's weights and total are halved when the total passes this
MAX_TOTAL = 1 << 30
# bits of `succ_source`: sample index mod 62, the prompt, or past samples of the prompt
SAMPLE_BITS, PROMPT_BIT, HISTORY_BIT = 62, 62, 63
# most nodes of a slot that are expanded in a level: a node's word has 3 bits for their rank
MAX_FRONTIER = 8
# rate of a sample for which a level costs `GraphConfig.decay`, in halves of a token per step
USUAL_HALVES = 5
# group key of a prior's contexts
PRIOR_KEY = 0
# the context of the whole group, which follows any token: this token's, of order 1
ANY = (1 << 31) - 4


@dataclass(frozen=True, slots=True)
class GraphConfig:
    """Sizes of the graph, and how it is read and written."""

    orders: tuple[int, ...] = (1, 2, 3, 5, 8, 12, 16)
    capacity: int = 1 << 17  # contexts, a power of two
    ways: int = 16  # contexts in a bucket, a power of two
    successors: int = 16
    # weights of one observation: the target's whole distribution, or a token without it; a sampled
    # token beside its distribution; a prompt token; a past sample's token without its distribution
    soft_weight: int = WEIGHT_ONE
    hard_weight: int = WEIGHT_ONE // 2
    prompt_weight: int = WEIGHT_ONE
    history_weight: int = WEIGHT_ONE
    # drafting
    smoothing: int = WEIGHT_ONE * 7 // 10  # weight of unobserved successors of a context
    trust: float = 0.7  # largest share of a context in the estimate that longer ones leave
    own_weight: float = 4.0  # factor of a successor that the sample itself has had there
    # sharpness of the coupling to noise in a context of order n: beta + n * beta_order
    beta: float = 0.4
    beta_order: float = 0.15
    uncoupled: float = 0.2  # share of a context's estimate that noise does not change
    # decay: factor per level on a path's probability, beside the graph's own, for a sample that
    # commits the usual 5/2 tokens per step. settle: steps at this rate that are added to the
    # sample's own; 0: all samples have `decay`
    decay: float = 0.8
    settle: int = 8
    # cost of a node per token by which its sample is ahead of the shortest one with as many steps,
    # at most `csd.state.pool.MAX_GROUP_PENALTY`, in the selection of a step's nodes; only at
    # temperature 0 and if all samples have the same prompt
    group_penalty: int = COST_ONE // 8
    frontier: int = 8  # nodes of a slot expanded in each level
    max_depth: int = 16
    min_prob: float = 0.0  # paths less likely than this are not drafted
    # contexts of the prior: tokens of each, and `smoothing` and `trust` for them
    prior_orders: tuple[int, ...] = (1, 2)
    prior_smoothing: int = WEIGHT_ONE * 2
    prior_trust: float = 0.7

    @property
    def context(self) -> int:
        return max(self.orders)

    @property
    def betas(self) -> tuple[float, ...]:
        """Sharpness of the noise by order, longest first, and for the context of any token."""
        return tuple(self.beta + n * self.beta_order for n in (*self.orders[::-1], 0))

    @property
    def prior_betas(self) -> tuple[float, ...]:
        """Sharpness of the noise by order of the prior, longest first."""
        return tuple(self.beta + n * self.beta_order for n in self.prior_orders[::-1])

    @property
    def level_cost(self) -> int:
        """Cost of a level of depth, for a sample that commits tokens at the usual rate."""
        return round(-math.log2(self.decay) * COST_ONE)

    def __post_init__(self) -> None:
        for name, orders in (("orders", self.orders), ("prior_orders", self.prior_orders)):
            if not orders or list(orders) != sorted({*orders} & {*range(1, 17)}):
                raise ValueError(f"{name} must be ascending, from 1 to 16, got {orders}")
        for name in ("capacity", "ways"):
            size = getattr(self, name)
            if size < 1 or size & (size - 1):
                raise ValueError(f"{name} must be a power of two, got {size}")
        # kernels count places in the table in 32 bits
        places = self.capacity * max(self.successors, self.context)
        if places >= 1 << 31:
            raise ValueError(
                f"capacity must be below 2^31 over the {max(self.successors, self.context)} places "
                f"of a context, got {self.capacity}"
            )
        if self.ways > min(self.capacity, 16):
            raise ValueError(f"ways must be at most {min(self.capacity, 16)}, got {self.ways}")
        # limits of the words that trees are sorted by
        if not 1 <= self.frontier <= MAX_FRONTIER:
            raise ValueError(f"frontier must be from 1 to {MAX_FRONTIER}, got {self.frontier}")
        limit = 128 >> len(self.orders).bit_length()
        if not 1 <= self.successors <= limit:
            raise ValueError(
                f"successors must be from 1 to {limit} with {len(self.orders)} orders, "
                f"got {self.successors}"
            )
        for name in ("smoothing", "prior_smoothing"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("trust", "prior_trust"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in (0, 1), got {getattr(self, name)}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must lie in (0, 1], got {self.decay}")
        if not 0 <= self.settle < 1 << 15:
            raise ValueError(f"settle must be from 0 to {(1 << 15) - 1}, got {self.settle}")
        if not 0 <= self.group_penalty <= MAX_GROUP_PENALTY:
            raise ValueError(
                f"group_penalty must be from 0 to {MAX_GROUP_PENALTY}, got {self.group_penalty}"
            )
        if not 0 <= self.uncoupled <= 1:
            raise ValueError(f"uncoupled must lie in [0, 1], got {self.uncoupled}")


@dataclass(slots=True)
class Table:
    """C contexts in buckets of `ways`, N tokens of context at most, E successors each."""

    ways: int
    # the group's key, which is never reused; -1 if empty
    entry_group: torch.Tensor = tensor("C", torch.int64, -1)
    entry_hash: torch.Tensor = tensor("C", torch.int64)  # hash of group and tokens
    # latest first, -1 beyond the context's order
    entry_tokens: torch.Tensor = tensor("C N", fill=-1)
    entry_total: torch.Tensor = tensor("C")  # weight of all observations
    entry_stamp: torch.Tensor = tensor("C")  # the insert that last touched it
    succ_token: torch.Tensor = tensor("C E", fill=-1)  # heaviest first, -1 where absent
    succ_weight: torch.Tensor = tensor("C E")  # 0 where absent
    # bit b: in sample b mod 62, 62: prompt, 63: history
    succ_source: torch.Tensor = tensor("C E", torch.int64)
    step: torch.Tensor = tensor("1")  # inserts so far
    dropped: torch.Tensor = tensor("1", torch.int64)  # contexts for which no entry was left
    prior: "Table | None" = None  # looked up behind this table's contexts of a group
    parts: int = 1  # of a prior's table, one after another

    @classmethod
    def empty(
        cls, config: GraphConfig, device: str | torch.device = "cpu", parts: int = 1
    ) -> "Table":
        """Returns a table of `parts` times the capacity."""
        sizes = {"C": parts * config.capacity, "N": config.context, "E": config.successors}
        return cls(config.ways, **allocate(cls, sizes, device, filled=True), parts=parts)

    @property
    def buckets(self) -> int:
        """Number of buckets of a part."""
        return self.entry_group.shape[0] // self.parts // self.ways

    def part(self, index: int) -> "Table":
        """One of the parts, a view of this table's tensors."""
        size = self.entry_group.shape[0] // self.parts
        rows = slice(index * size, (index + 1) * size)
        tensors = {name: getattr(self, name) for name in declared(Table)}
        return Table(
            self.ways, **{n: x if n in ("step", "dropped") else x[rows] for n, x in tensors.items()}
        )

    def arrays(self) -> Any:
        """The same table as numpy arrays: views of CPU tensors, copies of others."""
        return self.map(lambda x: x.numpy(force=True))

    def copy_(self, other: "Table") -> None:
        for name in declared(Table):
            getattr(self, name).copy_(getattr(other, name))
        if self.prior is not None and other.prior is not None:
            self.prior.copy_(other.prior)

    def map(self, function: Callable[[Any], Any]) -> "Table":
        prior = self.prior and self.prior.map(function)
        tensors = {name: function(getattr(self, name)) for name in declared(Table)}
        return Table(self.ways, **tensors, prior=prior, parts=self.parts)
