"""Observations of a step, as rows that `graph_insert` takes: M of the pool, and one per slot.

Row r of slot s, with the target's top 8 tokens t_u of probability p_u and the drawn token x:

    top_u     = round(p_u * soft),         halves to even
    hard      = the weight of the drawn token: 0 where row r is not on the slot's accepted path,
                else `hard`, or `soft` where no top_u is above 0, as in recordings
    weight_u  = top_u + hard * [t_u = x],  token t_u
    weight_8  = hard * [x is none of t],   token x
    total     = hard + soft * [some top_u > 0]

as successors of the row's own context. Row M + s updates the context ANY of the whole group with
the first 9 tokens on the slot's path, WEIGHT_ONE each; if more than GROUP_SLOTS slots of a group
have a path they take turns, since the time to merge updates into one context grows with the square
of their number. A row of total 0 has key -1 and is not inserted.

The kernel is also the first launch of an insert of a step's rows, in which it hashes their contexts
too (`triton/claim.py`).
"""

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from csd.kernels.common.operator import RecordOperator, launcher
from csd.kernels.table.rows import (
    GROUP_SLOTS,
    POOL,
    SLOTS,
    SUCCESSORS,
    VERDICT,
    Observed,
    observed_rows,
)
from csd.state.context_table import ANY, SAMPLE_BITS, WEIGHT_ONE, GraphConfig
from csd.state.pool import Pool
from csd.state.record import on_host
from csd.state.slots import Slots
from csd.state.verdict import TOP, Verdict


@launcher
def observe_triton() -> Callable:
    from csd.kernels.table.triton.observe import observe_triton

    return observe_triton


def any_context(rows: int, N: int, device: str | torch.device) -> torch.Tensor:
    """[rows, N] int32: the context ANY, which every token of a group follows."""
    context = torch.full((rows, N), -1, dtype=torch.int32, device=device)
    context[:, 0] = ANY
    return context


def observe_ref(pool: Pool, slots: Slots, verdict: Verdict, config: GraphConfig) -> Observed:
    """Reference in numpy."""
    slot, depth, context = (x.numpy(force=True) for x in (pool.slot, pool.depth, pool.context))
    group, group_key, sample_index, step = (
        x.numpy(force=True) for x in (slots.group, slots.group_key, slots.sample, slots.step)
    )
    sample, top_token, accept_row = (
        x.numpy(force=True) for x in (verdict.sample, verdict.top_token, verdict.accept_row)
    )
    (M, N), S = context.shape, group.size
    s = np.maximum(slot, 0)
    # the slot of each row, then the slots themselves
    owner = np.concatenate([s, np.arange(S)])
    token, weight = np.empty((2, M + S, SUCCESSORS), np.int32)
    total = np.empty(M + S, np.int32)

    # float64 holds the product exactly: one rounding, the same everywhere
    top = np.rint(verdict.top_prob.double().numpy(force=True) * config.soft_weight)
    has_top = top.any(1)
    # a row is accepted when its slot's path has it at its depth
    accepted_rows = accept_row[s, depth] == np.arange(M)
    hard = np.where(has_top, config.hard_weight, config.soft_weight) * accepted_rows
    drawn = (top_token == sample[:, None]) * hard[:, None]
    token[:M, :TOP], token[:M, TOP] = top_token, sample
    weight[:M, :TOP], weight[:M, TOP] = top + drawn, hard - drawn.sum(1)
    total[:M] = hard + has_top * config.soft_weight

    accepted = accept_row[:, :SUCCESSORS]
    path = accepted[:, 0] >= 0
    # [S, S]: slots of the same group that have a path
    mates = (group[:, None] == group) & path
    rounds = np.maximum((mates.sum(1) + GROUP_SLOTS - 1) // GROUP_SLOTS, 1)
    since = (step + np.tril(mates, -1).sum(1)) % rounds
    token[M:] = sample[np.maximum(accepted, 0)]
    weight[M:] = ((accepted >= 0) & (since == 0)[:, None]) * WEIGHT_ONE
    total[M:] = weight[M:].sum(1)

    whole = any_context(S, N, "cpu").numpy()
    columns = (
        np.where(total > 0, group_key[np.maximum(group, 0)[owner]], -1),
        np.concatenate([context, whole]),
        token,
        weight,
        total,
        (sample_index % SAMPLE_BITS)[owner],
    )
    return Observed(*(torch.from_numpy(x).to(pool.slot.device) for x in columns))


def with_config(run: Callable) -> Callable:
    @wraps(run)
    def call(pool: Any, slots: Any, verdict: Any, soft_weight: int, hard_weight: int) -> Observed:
        config = SimpleNamespace(soft_weight=soft_weight, hard_weight=hard_weight)
        return run(pool, slots, verdict, config)

    return call


def _loop() -> tuple[Callable[..., bool], Callable]:
    from csd.kernels.table.cpu import observe as loops

    def takes(pool: Any, slots: Any, verdict: Any, *weights: Any) -> bool:
        return on_host(*POOL(pool), *SLOTS(slots), *VERDICT(verdict))

    return takes, with_config(loops.observe)


_observe = RecordOperator(
    "observe",
    (POOL, SLOTS, VERDICT, "SymInt soft_weight", "SymInt hard_weight"),
    with_config(observe_ref),
    with_config(observe_triton),
    loop=_loop,
    returns=Observed,
    fake=lambda pool, slots, *others: observed_rows(pool, slots),
)


def observe(pool: Pool, slots: Slots, verdict: Verdict, config: GraphConfig) -> Observed:
    """Observations of the step that gave `verdict` over `pool`; the slots are not yet advanced."""
    # M and S follow from the fields that are read: deferred steps have no others in common
    sizes = {"A": max(verdict.accept_row.shape[-1], SUCCESSORS)}
    _observe.check(sizes, pool.slot.device, pool, slots, verdict)
    return _observe(pool, slots, verdict, config.soft_weight, config.hard_weight)
