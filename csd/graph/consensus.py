"""Consensus graph drafter: drafts each sample from the texts of its group's samples."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from csd.graph.drafter import StaticDrafter
from csd.graph.history import PastSample, capacity_for, max_history, pieces
from csd.graph.prior import PRIOR_CONFIG, Prior
from csd.kernels.draft import DraftNoise, draft_tree_ref
from csd.kernels.ops import Ops
from csd.kernels.table import graph_insert_ref
from csd.kernels.table.observe import any_context
from csd.kernels.table.rows import SUCCESSORS, Observed
from csd.state.context_table import HISTORY_BIT, PROMPT_BIT, GraphConfig, Table
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import Verdict
from csd.utils.device import upload

# most rows of all deferred steps; the memory of observation grows with their square
MAX_ROWS = 256
# slot fields that `observe` reads, copied because the slots change later
COPIED = ("group", "sample", "group_key", "step")


class DeferredInserts:
    """Steps whose updates are inserted before the next read of the graph.

    So a step without drafts is as fast as one without a graph, and one insert serves many steps.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[Pool, dict[str, torch.Tensor], Verdict]] = []
        self.rows = 0

    @property
    def full(self) -> bool:
        return self.rows >= MAX_ROWS

    def clear(self) -> None:
        self._steps.clear()
        self.rows = 0

    def add(self, pool: Pool, slots: Slots, verdict: Verdict) -> None:
        """Defer a step. Its pool and verdict must not change afterwards; the slots may."""
        copied = {name: getattr(slots, name).clone() for name in COPIED}
        self._steps.append((pool, copied, verdict))
        self.rows += max(pool.rows, slots.count)

    def observe(self, slots: Slots, config: GraphConfig, ops: Ops) -> Observed:
        """Observe all deferred steps at once and clear them; rows of ended groups are left out.

        Each step gets slots and groups of its own in the combined one.
        """
        S, G, row = slots.count, slots.group_key.shape[0], 0
        pools, groups, verdicts = [], [], []
        for i, (pool, copied, verdict) in enumerate(self._steps):
            pools.append(
                dict(slot=_moved(pool.slot, i * S), depth=pool.depth, context=pool.context)
            )
            groups.append(copied | dict(group=_moved(copied["group"], i * G)))
            verdicts.append(
                dict(
                    sample=verdict.sample,
                    top_token=verdict.top_token,
                    top_prob=verdict.top_prob,
                    accept_row=_moved(verdict.accept_row, row),
                )
            )
            row += pool.rows
        self.clear()
        own = _joined(groups)
        alive = torch.isin(own["group_key"], slots.group_key)
        own |= dict(live=own["group"] >= 0, group_key=torch.where(alive, own["group_key"], -1))
        # of the last step, of which only replaced fields are read
        return ops.observe(
            replace(pool, **_joined(pools)),
            replace(slots, **own),
            replace(verdict, **_joined(verdicts)),
            config,
        )


def _moved(index: torch.Tensor, by: int) -> torch.Tensor:
    return torch.where(index >= 0, index + by, -1)


def _joined(parts: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


# tokens of a prompt per insert, independent of the prefill chunks: bounds the time that a step
# waits and the weight that a call adds to a context (below 2^30), and makes the graph the same for
# every chunk size
PIECE = 512

# a past sample that matches continues to match: deeper trees from the start
WITH_HISTORY: dict[str, Any] = dict(orders=(1, 2, 4, 8, 16), decay=0.9, group_penalty=0, trust=0.85)
# with a prior a node has eight contexts in all, as without: a GPU's kernel has tiles of eight. Five
# orders of this trust leave to the group as a whole what seven of the usual trust do
WITH_PRIOR: dict[str, Any] = dict(orders=(1, 2, 4, 8, 16), trust=0.8)


def insert_prompt(
    table: Table,
    group_key: int,
    tokens: torch.Tensor,  # [T] int32
    live_groups: torch.Tensor,  # [G] int64
    config: GraphConfig,
    graph_insert: Callable = graph_insert_ref,
    first: int = 0,
) -> None:
    """Insert a new group's prompt: each token after `first` follows those before it."""
    N, device = config.context, tokens.device
    for begin in range(first, tokens.shape[0] - 1, PIECE):
        after = tokens[begin + 1 : begin + 1 + PIECE]
        rows = after.shape[0]
        # [rows, N] latest first: a context reaches back before its piece
        back = tokens[max(begin + 1 - N, 0) : begin + rows]
        back = torch.nn.functional.pad(back, (rows + N - 1 - back.shape[0], 0), value=-1)
        piece = back.unfold(0, N, 1).flip(1)
        # the context of the whole group takes SUCCESSORS tokens per row
        many = torch.nn.functional.pad(after, (0, -rows % SUCCESSORS), value=-1)
        many = many.view(-1, SUCCESSORS)
        one = torch.nn.functional.pad(after[:, None], (0, SUCCESSORS - 1), value=-1)
        token = torch.cat([one, many])
        weight = (token >= 0).int() * config.prompt_weight
        rows = token.shape[0]
        graph_insert(
            table,
            torch.full((rows,), group_key, device=device),
            torch.cat([piece, any_context(many.shape[0], N, device)]),
            token,
            weight,
            weight.sum(1, dtype=torch.int32),
            torch.full((rows,), PROMPT_BIT, dtype=torch.int32, device=device),
            live_groups,
            config.orders,
        )


class ConsensusGraph(StaticDrafter):
    """Drafts from n-grams of a group's prompt and samples, and the target's own probabilities."""

    shares_keys = inserts_any_pool = True

    def __init__(
        self,
        ops: Ops,
        device: str | torch.device,
        config: GraphConfig | None = None,
        tokens: int = 0,
        history: bool = False,
        prior_contexts: int = 0,
        prior_parts: int = 1,
    ):
        """Make the graph. config: by default chosen from the other arguments.

        tokens: most tokens in the graph at once. history: whether past samples are among them.
        prior_contexts, prior_parts: as in `Drafter`.
        """
        self._custom, self._history = config is not None, history
        self.prior_contexts, self.prior_parts = prior_contexts, prior_parts
        if config is None:
            config = GraphConfig(
                **WITH_HISTORY if history else WITH_PRIOR if prior_contexts else {}
            )
            config = replace(config, capacity=capacity_for(tokens, config))
        self.config = config
        self.context = self.config.context
        self.table = Table.empty(self.config, device)
        # prior and version of it that each part of the table has
        self._priors: list[tuple[Prior | None, int]] = [(None, 0)] * prior_parts
        if prior_contexts:
            sizes = replace(PRIOR_CONFIG, capacity=prior_contexts)
            self.table.prior = Table.empty(sizes, device, prior_parts)
            self.context = max(self.context, *self.config.prior_orders)
        self._ops = ops
        self._deferred = DeferredInserts()

    def start_call(self) -> None:
        self._deferred.clear()

    def use_prior(self, prior: Prior | None, part: int = 0) -> None:
        if prior is None or self._priors[part] == (prior, prior.version):
            return
        assert self.table.prior is not None
        self._priors[part] = prior, prior.copy_to(self.table.prior.part(part))

    def suits(self, tokens: int, history: bool) -> bool:
        """True if the graph is as large as a new one, and configured for history if needed."""
        if self._custom:
            return True
        fits = capacity_for(tokens, self.config) <= self.config.capacity
        return fits and self._history >= history

    def max_history(self, history: Sequence[PastSample], groups: int) -> int:
        return max_history(history, groups, self.config)

    @property
    def dropped(self) -> torch.Tensor:
        return self.table.dropped

    def observe_prompt(
        self, group_key: int, prompt: list[int], observed: int, read: int, slots: Slots
    ) -> int:
        """Insert whole pieces of a prompt, and its end when all has been read."""
        end = len(prompt) - 1 if read == len(prompt) else read - read % PIECE
        end = max(end, observed)
        if end > observed:
            first = max(observed + 1 - self.context, 0)
            piece = torch.tensor(prompt[first : end + 1], dtype=torch.int32)
            tokens = upload(piece, self.table.step.device)
            insert_prompt(
                self.table,
                group_key,
                tokens,
                slots.group_key,
                self.config,
                self._ops.graph_insert,
                observed - first,
            )
        return end

    def enter_history(
        self, group_key: int, prompt: list[int], history: Sequence[PastSample], slots: Slots
    ) -> Iterator[int]:
        """Insert past samples, one piece per `next`, which returns its rows."""
        for rows in pieces(prompt, history, self.config, PIECE):
            rows.insert(
                self.table,
                self._ops.graph_insert,
                group_key,
                HISTORY_BIT,
                slots.group_key,
                self.config.orders,
            )
            yield len(rows)

    def propose(
        self, slots: Slots, rows: int, noise: DraftNoise | None = None, *, nodes: int | None = None
    ) -> Pool:
        """Draft trees of all live slots in `rows` rows.

        noise: in place of the slots' own, for the reference only. nodes: most drafted nodes.
        """
        if noise is not None:
            return draft_tree_ref(self.table, slots, rows, self.config, noise, nodes=nodes)
        return self._ops.draft_tree(self.table, slots, rows, self.config, nodes=nodes)

    def insert(self, pool: Pool, slots: Slots, verdict: Verdict, defer: bool = False) -> None:
        """Insert every verified node's top 8, and the committed tokens."""
        if not defer:
            self._ops.insert_observed(self.table, pool, slots, verdict, self.config)
            return
        self._deferred.add(pool, slots, verdict)
        if self._deferred.full:
            self.flush(slots)

    def flush(self, slots: Slots) -> None:
        if self._deferred.rows:
            rows = self._deferred.observe(slots, self.config, self._ops)
            self._ops.graph_insert(self.table, *rows, slots.group_key, self.config.orders)
