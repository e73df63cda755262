"""What the host reads of a step, gathered into two tensors that one copy each takes to it.

Of the accepted path of slot s, rows a_0 .. a_{n-1} (the root first), in order:

    tokens, logprobs, raw_logprobs [S, A]   of row a_i; of row 0 behind the path
    sources [S, A]                          of row a_{i+1}, which drafted token i; 0 for the last
    cost [M]                                of drafted rows, -1 of roots and padding

beside counts, rows, finish and bad of every slot [S]; with `top` the target's top 8 [S, A, 8] at
the path's rows; with `trees` the pool's trees and all accepted rows. `layout` gives the place of
each.
"""

from math import prod
from typing import Any

import torch
import triton
import triton.language as tl

from csd.kernels.operator import Fields, RecordOperator
from csd.state.pool import Pool
from csd.state.verdict import TOP, Verdict

# rows of the pool that one program takes
BLOCK_R = 64

# name, shape and first element of a field
Places = tuple[tuple[str, tuple[int, ...], int], ...]


def layout(S: int, M: int, A: int, top: bool, trees: bool) -> tuple[Places, Places]:
    """Fields of the integers and of the floats, of S slots, M rows and paths of A rows at most."""
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


def snapshot_ref(
    pool: Pool, verdict: Verdict, top: bool, trees: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch. Returns int32 and floats, in the dtype of the log-probabilities."""
    row = verdict.accept_row.clamp(min=0).long()
    # token i of the path was drafted as row i + 1; the last one was sampled off the tree
    following = torch.nn.functional.pad(row[:, 1:], (0, 1))
    place = torch.arange(row.shape[1], device=row.device)
    drafted = place + 1 < verdict.accept_count[:, None]
    ints = [
        verdict.accept_count, pool.slot_nodes, verdict.finish, verdict.bad, verdict.sample[row],
        torch.where(drafted, pool.source[following], 0),
        torch.where(pool.depth > 0, pool.cost, -1),
    ]  # fmt: skip
    floats = [verdict.logprob[row], verdict.raw_logprob[row]]
    if top:
        ints.append(verdict.top_token[row])
        floats.append(verdict.top_prob[row].to(verdict.logprob.dtype))
    if trees:
        ints += [
            pool.slot_start, pool.token, pool.parent, pool.cost, pool.source, verdict.accept_row,
        ]  # fmt: skip
    return (
        torch.cat([x.reshape(-1).int() for x in ints]),
        torch.cat([x.reshape(-1) for x in floats]),
    )


@triton.jit(do_not_specialize=["S", "M"])
def _snapshot_kernel(
    slot_start_ptr,  # [S] int32
    slot_nodes_ptr,  # [S] int32
    depth_ptr,  # [M] int32
    cost_ptr,  # [M] int32
    source_ptr,  # [M] int32
    token_ptr,  # [M] int32
    parent_ptr,  # [M] int32
    sample_ptr,  # [M] int32
    logprob_ptr,  # [M]
    raw_logprob_ptr,  # [M]
    top_token_ptr,  # [M, TOP] int32
    top_prob_ptr,  # [M, TOP] float32
    accept_row_ptr,  # [S, A] int32
    accept_count_ptr,  # [S] int32
    finish_ptr,  # [S] int32
    bad_ptr,  # [S] bool
    ints_ptr,  # out
    floats_ptr,  # out
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
    # behind the fields that are always there, and behind the top
    more = 4 * S + 2 * S * A + M
    trees = more + (S * A * TOP if HAS_TOP else 0)
    r = me * BLOCK_R + tl.arange(0, BLOCK_R)
    in_pool = r < M
    cost = tl.load(cost_ptr + r, mask=in_pool, other=0)
    drafted = tl.load(depth_ptr + r, mask=in_pool, other=0) > 0
    tl.store(ints_ptr + more - M + r, tl.where(drafted, cost, -1), mask=in_pool)
    if HAS_TREES:
        at = ints_ptr + trees + S + r
        tl.store(at, tl.load(token_ptr + r, mask=in_pool, other=0), mask=in_pool)
        tl.store(at + M, tl.load(parent_ptr + r, mask=in_pool, other=0), mask=in_pool)
        tl.store(at + 2 * M, cost, mask=in_pool)
        tl.store(at + 3 * M, tl.load(source_ptr + r, mask=in_pool, other=0), mask=in_pool)
    if me >= S:
        return
    count = tl.load(accept_count_ptr + me)
    tl.store(ints_ptr + me, count)
    tl.store(ints_ptr + S + me, tl.load(slot_nodes_ptr + me))
    tl.store(ints_ptr + 2 * S + me, tl.load(finish_ptr + me))
    tl.store(ints_ptr + 3 * S + me, tl.load(bad_ptr + me).to(tl.int32))
    # [BLOCK_A]
    a = tl.arange(0, BLOCK_A)
    mask = a < A
    to = me * A + a
    accepted = tl.load(accept_row_ptr + to, mask=mask, other=-1)
    row = tl.maximum(accepted, 0)
    following = tl.maximum(tl.load(accept_row_ptr + to + 1, mask=a + 1 < A, other=0), 0)
    source = tl.load(source_ptr + following, mask=a + 1 < count, other=0)
    tl.store(ints_ptr + 4 * S + to, tl.load(sample_ptr + row), mask=mask)
    tl.store(ints_ptr + 4 * S + S * A + to, source, mask=mask)
    tl.store(floats_ptr + to, tl.load(logprob_ptr + row), mask=mask)
    tl.store(floats_ptr + S * A + to, tl.load(raw_logprob_ptr + row), mask=mask)
    if HAS_TOP:
        # [BLOCK_A, TOP]
        t = tl.arange(0, TOP)[None, :]
        of, put = row[:, None] * TOP + t, to[:, None] * TOP + t
        here = mask[:, None] & (t < TOP)
        tl.store(ints_ptr + more + put, tl.load(top_token_ptr + of), mask=here)
        tl.store(floats_ptr + 2 * S * A + put, tl.load(top_prob_ptr + of), mask=here)
    if HAS_TREES:
        tl.store(ints_ptr + trees + me, tl.load(slot_start_ptr + me))
        tl.store(ints_ptr + trees + S + 4 * M + to, accepted, mask=mask)


def snapshot_triton(
    pool: Pool, verdict: Verdict, top: bool, trees: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch."""
    (S, A), M = verdict.accept_row.shape, pool.token.shape[0]
    ints, floats = _empty(S, M, A, top, trees, verdict.logprob)
    _snapshot_kernel[(max(S, triton.cdiv(M, BLOCK_R)),)](
        slot_start_ptr=pool.slot_start,
        slot_nodes_ptr=pool.slot_nodes,
        depth_ptr=pool.depth,
        cost_ptr=pool.cost,
        source_ptr=pool.source,
        token_ptr=pool.token,
        parent_ptr=pool.parent,
        sample_ptr=verdict.sample,
        logprob_ptr=verdict.logprob,
        raw_logprob_ptr=verdict.raw_logprob,
        top_token_ptr=verdict.top_token,
        top_prob_ptr=verdict.top_prob,
        accept_row_ptr=verdict.accept_row,
        accept_count_ptr=verdict.accept_count,
        finish_ptr=verdict.finish,
        bad_ptr=verdict.bad,
        ints_ptr=ints,
        floats_ptr=floats,
        S=S,
        M=M,
        A=A,
        BLOCK_A=triton.next_power_of_2(A),
        TOP=TOP,
        HAS_TOP=top,
        HAS_TREES=trees,
        BLOCK_R=BLOCK_R,
        num_warps=1,
    )
    return ints, floats


def _empty(
    S: int, M: int, A: int, top: bool, trees: bool, logprob: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    ends = (places[-1] for places in layout(S, M, A, top, trees))
    ints, floats = (at + prod(shape) for _, shape, at in ends)
    return logprob.new_empty(ints, dtype=torch.int32), logprob.new_empty(floats)


def _fake(pool: Any, verdict: Any, top: bool, trees: bool) -> tuple[torch.Tensor, torch.Tensor]:
    S, A = verdict.accept_row.shape
    return _empty(S, pool.token.shape[0], A, top, trees, verdict.logprob)


_POOL = ("slot_start", "slot_nodes", "depth", "cost", "source", "token", "parent")
_VERDICT = (
    "sample", "logprob", "raw_logprob", "top_token", "top_prob", "accept_row", "accept_count",
    "finish", "bad",
)  # fmt: skip
_snapshot = RecordOperator(
    "snapshot",
    (Fields("pool", _POOL), Fields("verdict", _VERDICT), "bool top", "bool trees"),
    snapshot_ref,
    snapshot_triton,
    returns="(Tensor, Tensor)",
    fake=_fake,
)


def snapshot(
    pool: Pool, verdict: Verdict, top: bool = False, trees: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a step decided, as int32 and as floats; `layout` gives the place of each field.

    top: with the top 8 of the path's tokens. trees: with what was drafted.
    """
    _snapshot.check({"M": pool.token.shape[-1]}, verdict.sample.device, pool, verdict)
    return _snapshot(pool, verdict, top, trees)
