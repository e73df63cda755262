"""The consensus graph as a drafter: what a group's samples have said drafts for each of them."""

from collections.abc import Callable

import torch

from csd.device import upload
from csd.graph.drafter import Drafter
from csd.graph.table import PROMPT_BIT, GraphConfig, Table
from csd.kernels.draft_tree import Noise
from csd.kernels.graph_insert import graph_insert_ref
from csd.kernels.observe import SAID, any_context
from csd.kernels.ops import Ops
from csd.pool import Pool
from csd.slots import Slots
from csd.verdict import Verdict

# a prompt goes in by pieces of so many tokens, whatever the chunks that it is read in: a step waits
# for few of them, no call adds 2^30 to one context, and the graph is the same for every chunk size
PIECE = 512


def insert_step(
    table: Table, pool: Pool, slots: Slots, verdict: Verdict, config: GraphConfig, ops: Ops
) -> None:
    """What a step has shown: the target's top 8 at every row, the drawn token at kept ones."""
    seen = ops.observe(pool, slots, verdict, config)
    ops.graph_insert(table, *seen, slots.group_key, config.orders)


def insert_prompt(
    table: Table,
    group_key: int,
    tokens: torch.Tensor,  # [T] int32
    live_groups: torch.Tensor,  # [G] int64
    config: GraphConfig,
    graph_insert: Callable = graph_insert_ref,
    first: int = 0,
) -> None:
    """A new group's prompt: each of its tokens behind `first` follows those before it."""
    N, device = config.context, tokens.device
    for at in range(first, tokens.shape[0] - 1, PIECE):
        after = tokens[at + 1 : at + 1 + PIECE]
        rows = after.shape[0]
        # [rows, N] latest first: a context reaches back beyond its piece
        back = tokens[max(at + 1 - N, 0) : at + rows]
        back = torch.nn.functional.pad(back, (rows + N - 1 - back.shape[0], 0), value=-1)
        piece = back.unfold(0, N, 1).flip(1)
        # the group as a whole hears of SAID tokens a row
        said = torch.nn.functional.pad(after, (0, -rows % SAID), value=-1).view(-1, SAID)
        token = torch.cat([torch.nn.functional.pad(after[:, None], (0, SAID - 1), value=-1), said])
        weight = (token >= 0).int() * config.prompt_weight
        rows = token.shape[0]
        graph_insert(
            table,
            torch.full((rows,), group_key, device=device),
            torch.cat([piece, any_context(said.shape[0], N, device)]),
            token,
            weight,
            weight.sum(1, dtype=torch.int32),
            torch.full((rows,), PROMPT_BIT, dtype=torch.int32, device=device),
            live_groups,
            config.orders,
        )


class ConsensusGraph(Drafter):
    """Drafts from n-grams of a group's prompt and samples, and the target's own probabilities."""

    def __init__(self, ops: Ops, device: str | torch.device, config: GraphConfig | None = None):
        self.config = config or GraphConfig()
        self.context = self.config.context
        self.table = Table.empty(self.config, device)
        self._ops = ops

    def start(self, group_key: int, prompt: list[int], slots: Slots) -> None:
        """Enter a new group's prompt."""
        self.hear(group_key, prompt, 0, len(prompt), slots)

    def hear(
        self, group_key: int, prompt: list[int], heard: int, read: int, slots: Slots
    ) -> int:
        """Enter whole pieces of a prompt, and what is left of it when all has been read."""
        end = len(prompt) - 1 if read == len(prompt) else read - read % PIECE
        if end > heard:
            first = max(heard + 1 - self.context, 0)
            piece = torch.tensor(prompt[first : end + 1], dtype=torch.int32)
            tokens = upload(piece, self.table.step.device)
            insert_prompt(
                self.table, group_key, tokens, slots.group_key, self.config,
                self._ops.graph_insert, heard - first,
            )  # fmt: skip
        return end

    def propose(
        self, slots: Slots, rows: int, noise: Noise | None = None, nodes: int | None = None
    ) -> Pool:
        """Draft trees of all live slots in `rows` rows.

        noise: in place of the slots' own. nodes: drafted nodes at most.
        """
        return self._ops.draft_tree(self.table, slots, rows, self.config, noise, nodes=nodes)

    def insert(self, pool: Pool, slots: Slots, verdict: Verdict) -> None:
        """Every verified node's top 8, and the committed tokens."""
        insert_step(self.table, pool, slots, verdict, self.config, self._ops)
