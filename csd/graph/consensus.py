"""The consensus graph as a drafter: what a group's samples have said drafts for each of them."""

from collections.abc import Callable

import torch

from csd.graph.drafter import Drafter
from csd.graph.table import ANY, PROMPT_BIT, SOURCES, WEIGHT_ONE, GraphConfig, Table
from csd.kernels.draft_tree import Noise
from csd.kernels.graph_insert import graph_insert_ref
from csd.pool import Pool
from csd.slots import Slots
from csd.verdict import Verdict

# a prompt goes in by pieces, so that no call adds 2^30 to one context
PROMPT_ROWS = 4096
# tokens of a step that a slot tells the group as a whole
SAID = 9


def insert_step(
    table: Table,
    pool: Pool,
    slots: Slots,
    verdict: Verdict,
    config: GraphConfig,
    graph_insert: Callable = graph_insert_ref,
) -> None:
    """What a step has shown: the target's top 8 at every row, the drawn token at kept ones.

    A drawn token adds to its place among the top 8, or comes ninth. A row without top 8, as in
    recordings, shows what was drawn alone, and counts as much. One more row a slot tells the group
    as a whole what was drawn, whatever came before.
    """
    s = pool.slot.clamp(min=0).long()
    group_key = slots.group_key[slots.group[s].long()]
    weight = (verdict.top_prob * config.soft_weight).round().int()
    token = torch.where(weight > 0, verdict.top_token, -1)

    place = torch.arange(verdict.accept_row.shape[1], device=s.device)
    path = torch.where(place < verdict.accept_count[:, None], verdict.accept_row, -1)
    # the last place takes the writes of absent rows
    hard = torch.zeros(pool.rows + 1, dtype=torch.int32, device=s.device)
    hard[path.view(-1).long()] = config.hard_weight
    known = (token >= 0).any(1)
    hard = torch.where(known | (hard[:-1] == 0), hard[:-1], config.soft_weight)[:, None]
    drawn = token == verdict.sample[:, None]
    ninth = ~drawn.any(1, keepdim=True) & (hard > 0)
    total = known.int() * config.soft_weight + hard[:, 0]
    # a row that has nothing to say is not entered
    group_key = torch.where((pool.slot >= 0) & (total > 0), group_key, -1)

    said = path[:, :SAID].long()
    said = torch.where(said >= 0, verdict.sample[said], -1)
    said_weight = (said >= 0).int() * WEIGHT_ONE
    said_total = said_weight.sum(1, dtype=torch.int32)
    said_group = slots.group_key[slots.group.clamp(min=0).long()]
    graph_insert(
        table,
        torch.cat([group_key, torch.where(said_total > 0, said_group, -1)]),
        torch.cat([pool.context, _any_context(slots.count, config.context, s.device)]),
        torch.cat([
            torch.cat([token, torch.where(ninth, verdict.sample[:, None], -1)], 1), said
        ]),
        torch.cat([torch.cat([weight + drawn * hard, ninth * hard], 1), said_weight]),
        torch.cat([total, said_total]),
        torch.cat([slots.sample[s], slots.sample]) % SOURCES,
        slots.group_key,
        config.orders,
    )


def _any_context(rows: int, N: int, device) -> torch.Tensor:
    """[rows, N] context of what a group says after anything."""
    context = torch.full((rows, N), -1, dtype=torch.int32, device=device)
    context[:, 0] = ANY
    return context


def insert_prompt(
    table: Table,
    group_key: int,
    tokens: torch.Tensor,  # [T] int32
    live_groups: torch.Tensor,  # [G] int64
    config: GraphConfig,
    graph_insert: Callable = graph_insert_ref,
) -> None:
    """A new group's prompt: each of its tokens follows those before it."""
    N, device = config.context, tokens.device
    # [T - 1, N] latest first
    context = torch.nn.functional.pad(tokens, (N - 1, 0), value=-1).unfold(0, N, 1)[:-1].flip(1)
    for at in range(0, context.shape[0], PROMPT_ROWS):
        piece = context[at : at + PROMPT_ROWS]
        rows = piece.shape[0]
        after = tokens[at + 1 : at + 1 + rows]
        # the group as a whole hears of SAID tokens a row
        said = torch.nn.functional.pad(after, (0, -rows % SAID), value=-1).view(-1, SAID)
        token = torch.cat([torch.nn.functional.pad(after[:, None], (0, SAID - 1), value=-1), said])
        weight = (token >= 0).int() * config.prompt_weight
        rows = token.shape[0]
        graph_insert(
            table,
            torch.full((rows,), group_key, device=device),
            torch.cat([piece, _any_context(said.shape[0], N, device)]),
            token,
            weight,
            weight.sum(1, dtype=torch.int32),
            torch.full((rows,), PROMPT_BIT, dtype=torch.int32, device=device),
            live_groups,
            config.orders,
        )


class ConsensusGraph(Drafter):
    """Drafts from n-grams of a group's prompt and samples, and the target's own probabilities."""

    def __init__(self, ops, device, config: GraphConfig | None = None):
        self.config = config or GraphConfig()
        self.context = self.config.context
        self.table = Table.empty(self.config, device)
        self._ops = ops

    def start(self, group_key: int, prompt: list[int], slots: Slots) -> None:
        """Enter a new group's prompt."""
        if len(prompt) > 1:
            tokens = torch.tensor(prompt, dtype=torch.int32, device=self.table.step.device)
            insert = self._ops.graph_insert
            insert_prompt(self.table, group_key, tokens, slots.group_key, self.config, insert)

    def propose(
        self, slots: Slots, rows: int, noise: Noise | None = None, nodes: int | None = None
    ) -> Pool:
        """Draft trees of all live slots in `rows` rows.

        noise: in place of the slots' own. nodes: drafted nodes at most.
        """
        return self._ops.draft_tree(self.table, slots, rows, self.config, noise, nodes=nodes)

    def insert(self, pool: Pool, slots: Slots, verdict: Verdict) -> None:
        """Every verified node's top 8, and the committed tokens."""
        insert = self._ops.graph_insert
        insert_step(self.table, pool, slots, verdict, self.config, insert)
