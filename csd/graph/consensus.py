"""The consensus graph as a drafter: what a group's samples have said drafts for each of them."""

from collections.abc import Callable

import torch

from csd.graph.drafter import Drafter
from csd.graph.table import ANY, PROMPT_BIT, SOURCES, WEIGHT_ONE, GraphConfig, Table
from csd.kernels.draft_tree import Noise
from csd.kernels.graph_insert import graph_insert_ref
from csd.kernels.ops import Ops
from csd.pool import Pool
from csd.slots import Slots
from csd.verdict import TOP, Verdict

# a prompt goes in by pieces, so that no call adds 2^30 to one context
PROMPT_ROWS = 4096
# successors of a row: the target's top 8 and what was drawn; as many tokens of a step tells a slot
# the group as a whole
SAID = TOP + 1


class Rows:
    """What inserting a step needs and no step changes, for M rows of a pool and S slots."""

    def __init__(self, rows: int, slots: int, config: GraphConfig, device: str | torch.device):
        def number(value: int) -> torch.Tensor:
            return torch.full((), value, dtype=torch.int32, device=device)

        self.row = torch.arange(rows, dtype=torch.int32, device=device)
        self.slot = torch.arange(slots, dtype=torch.int32, device=device)
        self.any = _any_context(slots, config.context, device)
        # of a drawn token, where the target's top 8 are known and where not
        self.beside, self.alone = number(config.hard_weight), number(config.soft_weight)


def insert_step(
    table: Table,
    pool: Pool,
    slots: Slots,
    verdict: Verdict,
    config: GraphConfig,
    graph_insert: Callable = graph_insert_ref,
    fixed: Rows | None = None,
) -> None:
    """What a step has shown: the target's top 8 at every row, the drawn token at kept ones.

    A drawn token adds to its place among the top 8, or comes ninth. A row without top 8, as in
    recordings, shows what was drawn alone, and counts as much. One more row a slot tells the group
    as a whole what was drawn, whatever came before. A token of weight 0 is none.
    """
    M, S, device = pool.rows, slots.count, pool.token.device
    fixed = fixed or Rows(M, S, config, device)
    s = pool.slot.clamp(min=0)
    # the slot of each row, then the slots themselves
    owner = torch.cat([s, fixed.slot])
    key = slots.group_key.index_select(0, slots.group.clamp(min=0)).index_select(0, owner)
    bit = (slots.sample % SOURCES).index_select(0, owner)
    # every operation is a launch: what can be written in its place is
    weight = torch.empty((M + S, SAID), dtype=torch.int32, device=device)
    total = torch.empty(M + S, dtype=torch.int32, device=device)

    top = (verdict.top_prob * config.soft_weight).round().int()
    known = top.any(1)
    path = verdict.accept_row
    # a row is kept when its slot's path has it at its depth
    at = torch.add(pool.depth, s, alpha=path.shape[1])
    kept = path.view(-1).index_select(0, at) == fixed.row
    hard = torch.where(known, fixed.beside, fixed.alone).mul_(kept)
    drawn = (verdict.top_token == verdict.sample[:, None]) * hard[:, None]
    torch.add(top, drawn, out=weight[:M, :TOP])
    torch.sub(hard, drawn.sum(1), out=weight[:M, TOP])
    torch.add(hard, known, alpha=config.soft_weight, out=total[:M])

    said = path[:, :SAID]
    word = verdict.sample.index_select(0, said.clamp(min=0).view(-1)).view(S, SAID)
    torch.mul(said >= 0, WEIGHT_ONE, out=weight[M:])
    torch.sum(weight[M:], 1, dtype=torch.int32, out=total[M:])
    token = torch.cat([torch.cat([verdict.top_token, verdict.sample[:, None]], 1), word])
    graph_insert(
        table,
        # a row that has nothing to say is not entered
        torch.where(total > 0, key, -1),
        torch.cat([pool.context, fixed.any]),
        token,
        weight,
        total,
        bit,
        slots.group_key,
        config.orders,
    )


def _any_context(rows: int, N: int, device: str | torch.device) -> torch.Tensor:
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

    def __init__(self, ops: Ops, device: str | torch.device, config: GraphConfig | None = None):
        self.config = config or GraphConfig()
        self.context = self.config.context
        self.table = Table.empty(self.config, device)
        self._ops = ops
        self._rows: dict[tuple, Rows] = {}

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
        size = pool.rows, slots.count
        # made before a graph is captured: its warm-up comes here first
        if size not in self._rows:
            self._rows[size] = Rows(*size, self.config, pool.token.device)
        insert = self._ops.graph_insert
        insert_step(self.table, pool, slots, verdict, self.config, insert, self._rows[size])
