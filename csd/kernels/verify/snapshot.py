"""A step's result for the host, gathered into two tensors that take one copy each.

Fields of the accepted path of slot s, rows a_0 .. a_{n-1} (the root first), in order:

    tokens, logprobs, raw_logprobs [S, A]   of row a_i; -1, 0 and 0 after the path
    sources [S, A]                          of row a_{i+1}, which drafted token i; 0 for the last
    cost [M]                                of drafted rows, -1 of roots and padding

and counts, rows, finish and bad of every slot [S]; with `top` also the target's top 8 [S, A, 8] at
the path's rows, -1 and 0 after them; with `trees` also the pool's trees and all accepted rows.
`layout` gives the place of each in the two tensors.

One launch. A fused verification (`triton/descend.py`) calls the kernel's two parts instead.
"""

from math import prod
from typing import Any

import torch
import triton
import triton.language as tl

from csd.kernels.common.operator import Fields, RecordOperator
from csd.state.pool import Pool
from csd.state.verdict import TOP, Verdict

# name, shape and first element of a field
Places = tuple[tuple[str, tuple[int, ...], int], ...]


def layout(S: int, M: int, A: int, top: bool, trees: bool) -> tuple[Places, Places]:
    """Fields of the int32 and of the float tensor, for S slots, M rows and paths of <= A rows."""
    ints: dict[str, tuple[int, ...]] = {name: (S,) for name in ("count", "nodes", "finish", "bad")}
    ints |= {"tokens": (S, A), "sources": (S, A), "cost": (M,)}
    floats: dict[str, tuple[int, ...]] = {"logprobs": (S, A), "raw_logprobs": (S, A)}
    if top:
        ints["top_token"] = floats["top_prob"] = (S, A, TOP)
    if trees:
        ints["start"] = (S,)
        ints |= {name: (M,) for name in ("token", "parent", "path_cost", "source")}
        ints["accept_row"] = (S, A)
    return _places(ints), _places(floats)


def _places(shapes: dict[str, tuple[int, ...]]) -> Places:
    at, places = 0, []
    for name, shape in shapes.items():
        places.append((name, shape, at))
        at += prod(shape)
    return tuple(places)


def empty_snapshot(
    pool: Pool, verdict: Verdict, top: bool, trees: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates the int32 and the float tensor, uninitialized."""
    S, A = verdict.accept_row.shape
    ends = (places[-1] for places in layout(S, pool.token.shape[0], A, top, trees))
    ints, floats = (at + prod(shape) for _, shape, at in ends)
    logprob = verdict.logprob
    return logprob.new_empty(ints, dtype=torch.int32), logprob.new_empty(floats)


def snapshot_ref(
    pool: Pool, verdict: Verdict, top: bool, trees: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the int32 tensor, and the float tensor in the dtype of the log-probabilities."""
    row = verdict.accept_row.clamp(min=0).long()
    kept = verdict.accept_row >= 0
    # token i of the path was drafted as row i + 1; the last one was sampled off the tree
    following = torch.nn.functional.pad(row[:, 1:], (0, 1))
    place = torch.arange(row.shape[1], device=row.device)
    drafted = place + 1 < verdict.accept_count[:, None]
    ints = [
        verdict.accept_count,
        pool.slot_nodes,
        verdict.finish,
        verdict.bad,
        torch.where(kept, verdict.sample[row], -1),
        torch.where(drafted, pool.source[following], 0),
        torch.where(pool.depth > 0, pool.cost, -1),
    ]
    floats = [torch.where(kept, x[row], 0) for x in (verdict.logprob, verdict.raw_logprob)]
    if top:
        ints.append(torch.where(kept[..., None], verdict.top_token[row], -1))
        top_prob = verdict.top_prob[row].to(verdict.logprob.dtype)
        floats.append(torch.where(kept[..., None], top_prob, 0))
    if trees:
        ints += [
            pool.slot_start,
            pool.token,
            pool.parent,
            pool.cost,
            pool.source,
            verdict.accept_row,
        ]
    return (
        torch.cat([x.reshape(-1).int() for x in ints]),
        torch.cat([x.reshape(-1) for x in floats]),
    )


@triton.jit
def snapshot_rows(
    me,
    depth_ptr,  # [M] int32
    cost_ptr,  # [M] int32
    source_ptr,  # [M] int32
    token_ptr,  # [M] int32
    parent_ptr,  # [M] int32
    ints_ptr,  # out
    S,
    M,
    A: tl.constexpr,
    TOP: tl.constexpr,
    HAS_TOP: tl.constexpr,
    HAS_TREES: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Write the fields of BLOCK_R rows of the pool."""
    # offset of the optional fields, after those that are always present
    more = 4 * S + 2 * S * A + M
    r = me * BLOCK_R + tl.arange(0, BLOCK_R)
    in_pool = r < M
    cost = tl.load(cost_ptr + r, mask=in_pool, other=0)
    drafted = tl.load(depth_ptr + r, mask=in_pool, other=0) > 0
    tl.store(ints_ptr + more - M + r, tl.where(drafted, cost, -1), mask=in_pool)
    if HAS_TREES:
        at = ints_ptr + more + (S * A * TOP if HAS_TOP else 0) + S + r
        tl.store(at, tl.load(token_ptr + r, mask=in_pool, other=0), mask=in_pool)
        tl.store(at + M, tl.load(parent_ptr + r, mask=in_pool, other=0), mask=in_pool)
        tl.store(at + 2 * M, cost, mask=in_pool)
        tl.store(at + 3 * M, tl.load(source_ptr + r, mask=in_pool, other=0), mask=in_pool)


@triton.jit
def snapshot_slot(
    s,
    row,  # [BLOCK_A]: the path's rows, -1 after them
    token,  # [BLOCK_A]: their samples, arbitrary after them
    count,
    finish,
    bad,
    slot_start_ptr,  # [S] int32
    slot_nodes_ptr,  # [S] int32
    source_ptr,  # [M] int32
    logprob_ptr,  # [M]
    raw_logprob_ptr,  # [M]
    top_token_ptr,  # [M, TOP] int32
    top_prob_ptr,  # [M, TOP] float32
    ints_ptr,  # out
    floats_ptr,  # out
    S,
    M,
    A: tl.constexpr,
    TOP: tl.constexpr,
    HAS_TOP: tl.constexpr,
    HAS_TREES: tl.constexpr,
):
    """Write the fields of slot s."""
    more = 4 * S + 2 * S * A + M
    tl.store(ints_ptr + s, count)
    tl.store(ints_ptr + S + s, tl.load(slot_nodes_ptr + s))
    tl.store(ints_ptr + 2 * S + s, finish)
    tl.store(ints_ptr + 3 * S + s, bad.to(tl.int32))
    # [BLOCK_A]
    a = tl.arange(0, row.shape[0])
    mask, kept = a < A, a < count
    to = s * A + a
    # the next row on the path
    following = tl.sum(tl.where(a[None, :] == a[:, None] + 1, row[None, :], 0), 1)
    source = tl.load(source_ptr + following, mask=a + 1 < count, other=0)
    tl.store(ints_ptr + 4 * S + to, tl.where(kept, token, -1), mask=mask)
    tl.store(ints_ptr + 4 * S + S * A + to, source, mask=mask)
    logprob = tl.load(logprob_ptr + row, mask=kept, other=0)
    raw_logprob = tl.load(raw_logprob_ptr + row, mask=kept, other=0)
    tl.store(floats_ptr + to, logprob, mask=mask)
    tl.store(floats_ptr + S * A + to, raw_logprob, mask=mask)
    if HAS_TOP:
        # [BLOCK_A, TOP]
        t = tl.arange(0, TOP)[None, :]
        of, put = row[:, None] * TOP + t, to[:, None] * TOP + t
        here = kept[:, None] & (t < TOP)
        top_token = tl.load(top_token_ptr + of, mask=here, other=-1)
        top_prob = tl.load(top_prob_ptr + of, mask=here, other=0)
        tl.store(ints_ptr + more + put, top_token, mask=mask[:, None])
        tl.store(floats_ptr + 2 * S * A + put, top_prob, mask=mask[:, None])
    if HAS_TREES:
        trees = more + (S * A * TOP if HAS_TOP else 0)
        tl.store(ints_ptr + trees + s, tl.load(slot_start_ptr + s))
        tl.store(ints_ptr + trees + S + 4 * M + to, row, mask=mask)


@triton.jit(do_not_specialize=["S", "M"])
def _snapshot_kernel(
    slot_start_ptr,
    slot_nodes_ptr,
    depth_ptr,
    cost_ptr,
    source_ptr,
    token_ptr,
    parent_ptr,
    sample_ptr,  # [M] int32
    logprob_ptr,
    raw_logprob_ptr,
    top_token_ptr,
    top_prob_ptr,
    accept_row_ptr,  # [S, A] int32
    accept_count_ptr,  # [S] int32
    finish_ptr,  # [S] int32
    bad_ptr,  # [S] bool
    ints_ptr,
    floats_ptr,
    S,
    M,
    A: tl.constexpr,
    BLOCK_A: tl.constexpr,
    TOP: tl.constexpr,
    HAS_TOP: tl.constexpr,
    HAS_TREES: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    me = tl.program_id(0)
    snapshot_rows(
        me,
        depth_ptr,
        cost_ptr,
        source_ptr,
        token_ptr,
        parent_ptr,
        ints_ptr,
        S,
        M,
        A,
        TOP,
        HAS_TOP,
        HAS_TREES,
        BLOCK_R,
    )
    if me >= S:
        return
    # [BLOCK_A]
    a = tl.arange(0, BLOCK_A)
    row = tl.load(accept_row_ptr + me * A + a, mask=a < A, other=-1)
    token = tl.load(sample_ptr + row, mask=row >= 0, other=-1)
    snapshot_slot(
        me,
        row,
        token,
        tl.load(accept_count_ptr + me),
        tl.load(finish_ptr + me),
        tl.load(bad_ptr + me),
        slot_start_ptr,
        slot_nodes_ptr,
        source_ptr,
        logprob_ptr,
        raw_logprob_ptr,
        top_token_ptr,
        top_prob_ptr,
        ints_ptr,
        floats_ptr,
        S,
        M,
        A,
        TOP,
        HAS_TOP,
        HAS_TREES,
    )


# rows of the pool that one program copies
BLOCK_R = 64


def snapshot_triton(
    pool: Pool, verdict: Verdict, top: bool, trees: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch."""
    S, A = verdict.accept_row.shape
    out = empty_snapshot(pool, verdict, top, trees)
    _snapshot_kernel[snapshot_grid(pool, S)](
        sample_ptr=verdict.sample,
        accept_row_ptr=verdict.accept_row,
        accept_count_ptr=verdict.accept_count,
        finish_ptr=verdict.finish,
        bad_ptr=verdict.bad,
        logprob_ptr=verdict.logprob,
        raw_logprob_ptr=verdict.raw_logprob,
        token_ptr=pool.token,
        parent_ptr=pool.parent,
        depth_ptr=pool.depth,
        slot_start_ptr=pool.slot_start,
        slot_nodes_ptr=pool.slot_nodes,
        **snapshot_arguments(pool, verdict, out, top, trees),
        A=A,
        BLOCK_A=triton.next_power_of_2(A),
        num_warps=1,
    )
    return out


def snapshot_grid(pool: Pool, S: int) -> tuple[int]:
    return (max(S, triton.cdiv(pool.token.shape[0], BLOCK_R)),)


def snapshot_arguments(
    pool: Pool,
    verdict: Verdict,
    out: tuple[torch.Tensor, torch.Tensor],
    top: bool,
    trees: bool,
) -> dict[str, Any]:
    """Arguments of `snapshot_rows` and `snapshot_slot` that the verification's kernel lacks."""
    return dict(
        cost_ptr=pool.cost,
        source_ptr=pool.source,
        top_token_ptr=verdict.top_token,
        top_prob_ptr=verdict.top_prob,
        ints_ptr=out[0],
        floats_ptr=out[1],
        S=verdict.accept_row.shape[0],
        M=pool.token.shape[0],
        TOP=TOP,
        HAS_TOP=top,
        HAS_TREES=trees,
        BLOCK_R=BLOCK_R,
    )


_POOL = ("slot_start", "slot_nodes", "depth", "cost", "source", "token", "parent")
_VERDICT = (
    "sample",
    "logprob",
    "raw_logprob",
    "top_token",
    "top_prob",
    "accept_row",
    "accept_count",
    "finish",
    "bad",
)
_snapshot = RecordOperator(
    "snapshot",
    (Fields("pool", _POOL), Fields("verdict", _VERDICT), "bool top", "bool trees"),
    snapshot_ref,
    snapshot_triton,
    returns="(Tensor, Tensor)",
    fake=empty_snapshot,
)


def snapshot(
    pool: Pool, verdict: Verdict, top: bool = False, trees: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a step's result as int32 and as floats; `layout` gives the place of each field.

    top: include the top 8 at the path's rows. trees: include the drafted trees.
    """
    _snapshot.check({"M": pool.token.shape[-1]}, verdict.sample.device, pool, verdict)
    return _snapshot(pool, verdict, top, trees)
