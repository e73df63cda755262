"""The consensus graph as a drafter: what a group's samples have said drafts for each of them."""

import torch

from csd.graph.table import ONE, PROMPT_BIT, SAMPLE_BITS, GraphConfig, Table
from csd.pool import Pool
from csd.slots import Slots
from csd.verdict import Verdict

# prompts go in a piece at a time
PROMPT_ROWS = 256
# a successor below this probability is not worth a place
MIN_PROB = 1 / 256


class ConsensusGraph:
    """Drafts from n-grams of the group's prompt and samples, and the target's own probabilities."""

    def __init__(self, ops, device, config: GraphConfig | None = None):
        self.config = config or GraphConfig()
        self.table = Table.empty(self.config, device)
        self._ops = ops
        self._stamp = 0

    @property
    def context(self) -> int:
        """Tokens of context that `Slots` must keep."""
        return self.config.context

    def start(self, group_key: int, prompt: list[int], slots: Slots) -> None:
        """Enter a new group's prompt: each token follows those before it."""
        if len(prompt) < 2:
            return
        c = self.config
        tokens = torch.tensor(prompt, dtype=torch.int32, device=self.table.group.device)
        padded = torch.nn.functional.pad(tokens, (c.context - 1, 0), value=-1)
        # [T - 1, N], latest first
        context = padded[:-1].unfold(0, c.context, 1).flip(1)
        for i in range(0, context.shape[0], PROMPT_ROWS):
            rows = context[i : i + PROMPT_ROWS]
            n = rows.shape[0]
            weight = torch.full((n,), round(c.prompt * ONE), dtype=torch.int32)
            self._insert(
                torch.full((n,), group_key),
                rows,
                tokens[i + 1 : i + 1 + n, None],
                weight[:, None],
                weight,
                torch.full((n,), 1 << PROMPT_BIT),
                slots,
            )

    def propose(self, slots: Slots, rows: int) -> Pool:
        """Draft trees of all live slots in `rows` rows."""
        return self._ops.draft_tree(self.table, slots, rows, self.config)

    def insert(self, pool: Pool, slots: Slots, verdict: Verdict) -> None:
        """Every verified node's top 8, and the committed tokens."""
        c = self.config
        live = pool.slot >= 0
        s = pool.slot.clamp(min=0).long()
        group = torch.where(live, slots.group_key[slots.group[s].long()], -1)
        prob = verdict.top_prob
        weight = torch.where(prob >= MIN_PROB, (prob * (c.soft * ONE)).round(), 0).int()
        token = torch.where(weight > 0, verdict.top_token, -1)
        total = torch.full_like(pool.slot, round(c.soft * ONE))
        hard = torch.zeros_like(total)
        # rows of the kept path also count what was drawn; other writes land behind the table
        path = verdict.accept_row.flatten().long()
        hard = torch.nn.functional.pad(hard, (0, 1))
        hard[path] = round(c.hard * ONE)
        hard = hard[:-1]
        drawn = token == verdict.sample[:, None]
        weight = weight + torch.where(drawn, hard[:, None], 0)
        extra = torch.where(~drawn.any(-1) & (hard > 0), verdict.sample, -1)
        self._insert(
            group,
            pool.context,
            torch.cat([token, extra[:, None]], dim=1),
            torch.cat([weight, hard[:, None]], dim=1),
            total + hard,
            torch.ones_like(s) << (slots.sample[s] % SAMPLE_BITS),
            slots,
        )

    def _insert(self, group, context, token, weight, total, source, slots: Slots) -> None:
        self._stamp += 1
        self._ops.graph_insert(
            self.table, group, context, token, weight, total, source, slots.group_key,
            self.config.orders, self._stamp,
        )  # fmt: skip
