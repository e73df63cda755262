"""Token texts of a group's samples, searched by the paper's drafter.

Every slot has ROUNDS rows and writes its samples to them in turn, so that a finished sample is
stored until the slot's ROUNDS-th sample after it. A row begins with the last k tokens of the
prompt, so that a window may begin there; k is the size of the query. Rows of freed groups are
never read, since keys are not reused.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from csd.state.context_table import MAX_FRONTIER, GraphConfig
from csd.state.pool import MAX_CHILDREN, MAX_DEPTH, Pool
from csd.state.record import allocate, named, tensor
from csd.state.slots import Slots

ROUNDS = 4
# a probability of one
CHANCE_ONE = 1 << 16


@dataclass(slots=True)
class SlotTexts:
    """R = S * ROUNDS rows of W = k + T places."""

    # -1 in rows that are not written yet
    group_key: torch.Tensor = tensor("R", torch.int64, -1)
    sample: torch.Tensor = tensor("R", fill=-1)
    length: torch.Tensor = tensor("R")  # tokens of the row, the prompt's last k included
    token: torch.Tensor = tensor("R W", fill=-1)  # -1 before the prompt and after the length
    chance: torch.Tensor = tensor("R W")  # probability of the target's draw, times CHANCE_ONE
    begun: torch.Tensor = tensor("S")  # samples that the slot has begun

    @classmethod
    def empty(
        cls,
        slots: int,
        tokens: int,
        k: int,
        device: str | torch.device = "cpu",
        rounds: int = ROUNDS,
    ) -> "SlotTexts":
        """Returns empty rows; tokens: most tokens of a sample."""
        sizes = {"S": slots, "R": slots * rounds, "W": k + tokens}
        return cls(**allocate(cls, sizes, device, filled=True))

    @property
    def rows(self) -> int:
        return self.token.shape[0]

    def append(self, pool: Pool, slots: Slots, count: torch.Tensor, k: int) -> None:
        """Appends the last count [S] tokens of each slot, in place; a new sample gets a new row.

        pool: the step's, whose roots' contexts have the prompt's end. Nothing is read on the host.
        """
        S, R = slots.count, self.rows
        rounds = R // S
        some = count > 0
        old = (slots.generated - count).long()
        fresh = some & (old == 0)
        self.begun += fresh.int()
        row = torch.arange(S, device=count.device) * rounds + self.begun % rounds
        group = slots.group.clamp(min=0).long()
        for name, value in (("group_key", slots.group_key[group]), ("sample", slots.sample)):
            field = getattr(self, name)
            field[row] = torch.where(fresh, value, field[row])
        self.length[row] = torch.where(some, k + slots.generated, self.length[row])

        # [S, k + A]: the prompt's end where the sample is new, then what was committed
        root = pool.slot_start.long().clamp(max=pool.rows - 1)
        before = pool.context[root, :k].flip(1)
        offset = torch.arange(MAX_DEPTH + 1, device=count.device)
        position = (old[:, None] + offset).clamp(0, slots.tokens.shape[1] - 1)
        newest = slots.tokens.gather(1, position)
        chance = (slots.logprobs.gather(1, position).double().exp() * CHANCE_ONE).round().int()
        token = torch.cat([before, newest], 1)
        chance = torch.cat([torch.full_like(before, CHANCE_ONE), chance], 1)
        written = torch.cat([fresh[:, None].expand(S, k), offset < count[:, None]], 1)
        column = torch.cat([torch.arange(k, device=position.device).expand(S, k), k + position], 1)
        # the other elements rewrite column 0 with its value: no element gets two different values
        column = torch.where(written, column, 0)
        for field, value in ((self.token, token), (self.chance, chance)):
            zeroth = torch.where(fresh, value[:, 0], field[row, 0])
            field[row[:, None], column] = torch.where(written, value, zeroth[:, None])


@named
class Candidates(NamedTuple):
    """Candidate continuations of each slot, P of at most L tokens."""

    token: torch.Tensor = tensor("S P L")  # -1 after a text's end and in absent candidates
    chance: torch.Tensor = tensor("S P L")  # probabilities times CHANCE_ONE, 0 without a token


@dataclass(frozen=True, slots=True)
class DagConfig:
    """Parameters of the paper's method: queries, weights of edges, and extraction."""

    k: int = 4  # tokens of the query
    edits: int = 1  # eps, most edits between a match and the query
    alpha: float = 0.5  # share of the target's probability in an edge's weight
    tree: bool = False  # the paths of largest weight in place of the greedy chain
    candidates: int = 64  # most matches of a slot
    tokens: int = MAX_DEPTH  # layers
    frontier: int = 8  # nodes of a slot expanded in each level of a tree
    min_prob: float = 0.0  # paths less likely than this are not drafted

    def __post_init__(self) -> None:
        for name, low, high in (
            ("k", 1, 16),
            ("edits", 0, self.k - 1),
            ("alpha", 0, 1),
            ("candidates", 1, 256),
            ("tokens", 1, MAX_DEPTH),
            ("frontier", 1, MAX_FRONTIER),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be from {low} to {high}, got {getattr(self, name)}")

    @property
    def share(self) -> int:
        """alpha as a multiple of 1 / CHANCE_ONE."""
        return round(self.alpha * CHANCE_ONE)

    @property
    def width(self) -> int:
        """Nodes expanded in each level: one for a chain."""
        return self.frontier if self.tree else 1

    @property
    def limits(self) -> GraphConfig:
        """Limits of trees, as a config of the default drafter."""
        return GraphConfig(
            max_depth=self.tokens, frontier=self.width, min_prob=self.min_prob, decay=1.0
        )

    @property
    def children(self) -> int:
        """Most children of a node, by weight."""
        return MAX_CHILDREN if self.tree else 1
