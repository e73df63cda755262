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

The kernel's device function `observe_rows` also runs in the first launch of an insert
(`triton/claim.py`), which then hashes the rows' contexts.
"""

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from csd.kernels.common.operator import Fields, RecordOperator
from csd.kernels.table.rows import GROUP_SLOTS, SUCCESSORS, Observed, _empty, observed_rows
from csd.state.context_table import ANY, SAMPLE_BITS, WEIGHT_ONE, GraphConfig
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import TOP, Verdict


@triton.jit
def observe_rows(
    r,  # [BLOCK_R]: rows of the output
    slot_ptr,  # [M] int32
    depth_ptr,  # [M] int32
    context_ptr,  # [M, N] int32
    group_ptr,  # [S] int32
    sample_index_ptr,  # [S] int32
    group_key_ptr,  # [G] int64
    step_ptr,  # [S] int32
    sample_ptr,  # [M] int32
    top_token_ptr,  # [M, TOP] int32
    top_prob_ptr,  # [M, TOP] float32
    accept_row_ptr,  # [S, A] int32
    out_key_ptr,  # [M + S] int64
    out_context_ptr,  # [M + S, N] int32
    out_token_ptr,  # [M + S, TOP + 1] int32
    out_weight_ptr,  # [M + S, TOP + 1] int32
    out_total_ptr,  # [M + S] int32
    out_bit_ptr,  # [M + S] int32
    rows,
    slots,
    SOFT: tl.constexpr,
    HARD: tl.constexpr,
    ONE: tl.constexpr,
    ANY: tl.constexpr,
    SAMPLE_BITS: tl.constexpr,
    GROUP_SLOTS: tl.constexpr,
    A: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Writes rows r. Returns their group keys [BLOCK_R] (-1: none) and contexts [.., BLOCK_N]."""
    # [BLOCK_R]
    inside = r < rows + slots
    node = r < rows
    slot = tl.load(slot_ptr + r, mask=node, other=0)
    slot = tl.where(node, tl.maximum(slot, 0), tl.minimum(r - rows, slots - 1))
    group = tl.maximum(tl.load(group_ptr + slot), 0)
    key = tl.load(group_key_ptr + group)
    bit = tl.load(sample_index_ptr + slot) % SAMPLE_BITS
    depth = tl.load(depth_ptr + r, mask=node, other=0)
    accepted = node & (tl.load(accept_row_ptr + slot * A + depth) == r)
    drawn = tl.load(sample_ptr + r, mask=node, other=-1)

    # [BLOCK_R, BLOCK_U]
    u = tl.arange(0, BLOCK_U)[None, :]
    likely = node[:, None] & (u < TOP)
    at = r[:, None] * TOP + u
    scaled = tl.load(top_prob_ptr + at, mask=likely, other=0.0).to(tl.float64) * SOFT
    whole = tl.floor(scaled)
    left = scaled - whole
    top = whole.to(tl.int32)
    up = (left > 0.5) | ((left == 0.5) & (top % 2 == 1))
    top += up.to(tl.int32)
    has_top = tl.max(top, 1) > 0
    hard = tl.where(accepted, tl.where(has_top, HARD, SOFT), 0)
    token = tl.load(top_token_ptr + at, mask=likely, other=-1)
    equal = likely & (token == drawn[:, None])
    weight = top + tl.where(equal, hard[:, None], 0)
    ninth = hard - tl.sum(tl.where(equal, hard[:, None], 0), 1)
    weight = tl.where(u == TOP, ninth[:, None], weight)
    token = tl.where(u == TOP, drawn[:, None], token)
    total = hard + tl.where(has_top, SOFT, 0)

    # a slot's own row; many slots of a group take turns
    own_group = tl.load(group_ptr + slot)
    # [BLOCK_R, BLOCK_S]: slots of the group that have a path, and those of them before the slot
    mates = tl.zeros([BLOCK_R, BLOCK_S], tl.int32)
    before = tl.zeros([BLOCK_R, BLOCK_S], tl.int32)
    # programs whose rows are all nodes skip the loop
    some = tl.max(r, 0) >= rows
    for start in range(0, slots * some.to(tl.int32), BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)[None, :]
        path = tl.load(accept_row_ptr + s * A, mask=s < slots, other=-1) >= 0
        mate = path & (tl.load(group_ptr + s, mask=s < slots, other=-1) == own_group[:, None])
        mates += mate.to(tl.int32)
        before += (mate & (s < slot[:, None])).to(tl.int32)
    rounds = tl.maximum((tl.sum(mates, 1) + GROUP_SLOTS - 1) // GROUP_SLOTS, 1)
    due = (tl.load(step_ptr + slot) + tl.sum(before, 1)) % rounds == 0
    of_slot = (inside & (r >= rows))[:, None] & (u <= TOP)
    path = tl.load(accept_row_ptr + slot[:, None] * A + u, mask=of_slot, other=-1)
    word = tl.load(sample_ptr + tl.maximum(path, 0), mask=of_slot, other=-1)
    update = tl.where((path >= 0) & due[:, None], ONE, 0)
    token = tl.where(node[:, None], token, word)
    weight = tl.where(node[:, None], weight, update)
    total = tl.where(node, total, tl.sum(update, 1))

    key = tl.where(total > 0, key, -1)
    tl.store(out_key_ptr + r, key, mask=inside)
    tl.store(out_total_ptr + r, total, mask=inside)
    tl.store(out_bit_ptr + r, bit, mask=inside)
    out = r[:, None] * (TOP + 1) + u
    written = inside[:, None] & (u <= TOP)
    tl.store(out_token_ptr + out, token, mask=written)
    tl.store(out_weight_ptr + out, weight, mask=written)
    # [BLOCK_R, BLOCK_N]
    n = tl.arange(0, BLOCK_N)[None, :]
    at = r[:, None] * N + n
    before = tl.load(context_ptr + at, mask=node[:, None] & (n < N), other=-1)
    anything = (r >= rows)[:, None] & (n == 0)
    context = tl.where(anything, ANY, before)
    tl.store(out_context_ptr + at, context, mask=inside[:, None] & (n < N))
    return key, context


BLOCK_R, BLOCK_S = 4, 64


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
    kept = accept_row[s, depth] == np.arange(M)
    hard = np.where(has_top, config.hard_weight, config.soft_weight) * kept
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
    found = (
        np.where(total > 0, group_key[np.maximum(group, 0)[owner]], -1),
        np.concatenate([context, whole]),
        token,
        weight,
        total,
        (sample_index % SAMPLE_BITS)[owner],
    )
    return Observed(*(torch.from_numpy(x).to(pool.slot.device) for x in found))


@triton.jit(do_not_specialize=["rows", "slots"])
def _observe_kernel(
    slot_ptr,  # [M] int32
    depth_ptr,  # [M] int32
    context_ptr,  # [M, N] int32
    group_ptr,  # [S] int32
    sample_index_ptr,  # [S] int32
    group_key_ptr,  # [G] int64
    step_ptr,  # [S] int32
    sample_ptr,  # [M] int32
    top_token_ptr,  # [M, TOP] int32
    top_prob_ptr,  # [M, TOP] float32
    accept_row_ptr,  # [S, A] int32
    out_key_ptr,  # [M + S] int64
    out_context_ptr,  # [M + S, N] int32
    out_token_ptr,  # [M + S, TOP + 1] int32
    out_weight_ptr,  # [M + S, TOP + 1] int32
    out_total_ptr,  # [M + S] int32
    out_bit_ptr,  # [M + S] int32
    rows,
    slots,
    SOFT: tl.constexpr,
    HARD: tl.constexpr,
    ONE: tl.constexpr,
    ANY: tl.constexpr,
    SAMPLE_BITS: tl.constexpr,
    GROUP_SLOTS: tl.constexpr,
    A: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    observe_rows(
        r,
        slot_ptr,
        depth_ptr,
        context_ptr,
        group_ptr,
        sample_index_ptr,
        group_key_ptr,
        step_ptr,
        sample_ptr,
        top_token_ptr,
        top_prob_ptr,
        accept_row_ptr,
        out_key_ptr,
        out_context_ptr,
        out_token_ptr,
        out_weight_ptr,
        out_total_ptr,
        out_bit_ptr,
        rows,
        slots,
        SOFT,
        HARD,
        ONE,
        ANY,
        SAMPLE_BITS,
        GROUP_SLOTS,
        A,
        N,
        BLOCK_N,
        TOP,
        BLOCK_U,
        BLOCK_R,
        BLOCK_S,
    )


def observe_triton(pool: Pool, slots: Slots, verdict: Verdict, config: GraphConfig) -> Observed:
    """One launch."""
    out = observed_rows(pool, slots)
    _observe_kernel[(triton.cdiv(pool.rows + slots.count, BLOCK_R),)](
        **observe_arguments(pool, slots, verdict, config, out), BLOCK_R=BLOCK_R, num_warps=1
    )
    return out


def observe_arguments(
    pool: Pool, slots: Slots, verdict: Verdict, config: GraphConfig, out: Observed
) -> dict[str, Any]:
    """Keyword arguments of `observe_rows`, except the row indices and their block size."""
    M, N = pool.context.shape
    return dict(
        slot_ptr=pool.slot,
        depth_ptr=pool.depth,
        context_ptr=pool.context.contiguous(),
        group_ptr=slots.group,
        sample_index_ptr=slots.sample,
        group_key_ptr=slots.group_key,
        step_ptr=slots.step,
        sample_ptr=verdict.sample,
        top_token_ptr=verdict.top_token.contiguous(),
        top_prob_ptr=verdict.top_prob.contiguous(),
        accept_row_ptr=verdict.accept_row.contiguous(),
        out_key_ptr=out.group_key,
        out_context_ptr=out.context,
        out_token_ptr=out.succ_token,
        out_weight_ptr=out.succ_weight,
        out_total_ptr=out.row_total,
        out_bit_ptr=out.source_bit,
        rows=M,
        slots=slots.count,
        SOFT=config.soft_weight,
        HARD=config.hard_weight,
        ONE=WEIGHT_ONE,
        ANY=ANY,
        SAMPLE_BITS=SAMPLE_BITS,
        GROUP_SLOTS=GROUP_SLOTS,
        A=verdict.accept_row.shape[1],
        N=N,
        BLOCK_N=triton.next_power_of_2(N),
        TOP=TOP,
        BLOCK_U=triton.next_power_of_2(SUCCESSORS),
        BLOCK_S=BLOCK_S,
    )


def _fake(pool: Any, slots: Any, verdict: Any, weights: Any) -> Observed:
    (M, N), S = pool.context.shape, slots.group.shape[0]
    return _empty(M, S, N, pool.slot.device)


def with_config(run: Callable) -> Callable:
    @wraps(run)
    def call(pool: Any, slots: Any, verdict: Any, soft_weight: int, hard_weight: int) -> Observed:
        config = SimpleNamespace(soft_weight=soft_weight, hard_weight=hard_weight)
        return run(pool, slots, verdict, config)

    return call


def _loop() -> tuple[Callable[..., bool], Callable]:
    from csd.kernels.numba.tensors import on_host
    from csd.kernels.table.cpu import observe as loops

    def takes(pool: Any, slots: Any, verdict: Any, *weights: Any) -> bool:
        return on_host(*loops.observed_tensors(pool, slots, verdict))

    return takes, with_config(loops.observe)


_observe = RecordOperator(
    "observe",
    (
        Fields("pool", ("slot", "depth", "context")),
        Fields("slots", ("group", "sample", "group_key", "step")),
        Fields("verdict", ("sample", "top_token", "top_prob", "accept_row")),
        "SymInt soft_weight",
        "SymInt hard_weight",
    ),
    with_config(observe_ref),
    with_config(observe_triton),
    loop=_loop,
    returns=Observed,
    fake=with_config(_fake),
)


def observe(pool: Pool, slots: Slots, verdict: Verdict, config: GraphConfig) -> Observed:
    """Observations of the step that gave `verdict` over `pool`; the slots are not yet advanced."""
    A = max(verdict.accept_row.shape[-1], SUCCESSORS)
    sizes = {"M": pool.rows, "S": slots.count, "A": A}
    _observe.check(sizes, pool.slot.device, pool, slots, verdict)
    return _observe(pool, slots, verdict, config.soft_weight, config.hard_weight)
