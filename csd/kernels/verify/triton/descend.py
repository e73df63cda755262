"""Follow one slot's accepted path per program: the last launch of a verification.

It ends `verify`, and with the arguments of `decide` a step's verification: its program then also
advances its slot (`csd/kernels/verify/advance_slots.py`) and writes what the host reads of both
(`csd/kernels/verify/snapshot.py`). Each of the three gets the results of the previous one in
registers. Log-probabilities of the path's rows are read from memory, since the descent
clears only those off the path.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from csd.kernels.verify.triton.slots import advance_slot, snapshot_rows, snapshot_slot
from csd.state import pool, verdict

MAX_NODES = tl.constexpr(pool.MAX_NODES)
RUNNING, STOP = tl.constexpr(verdict.RUNNING), tl.constexpr(verdict.STOP)
LENGTH = tl.constexpr(verdict.LENGTH)


class FinishConstants(NamedTuple):
    """Constants of `finish_kernel`."""

    A: int
    BLOCK_A: int
    STOPS: int
    # if the launch also advances the slots and takes the snapshot
    N: int | None = None
    BLOCK_N: int | None = None
    HAS_TOP: bool = False
    HAS_TREES: bool = False
    BLOCK_R: int | None = None


@triton.jit(do_not_specialize=["S", "M", "tokens", "words"])
def finish_kernel(
    pool,
    slots,
    bad_row_ptr,  # [M] int32
    verdict,  # the fields of slots, out; log-probabilities, in and out: raw ones are 0 off the path
    C: tl.constexpr,
    # if the launch also advances the slots and takes the snapshot
    advanced=None,  # the slots, in and out
    trees=None,  # the pool
    out=None,  # tensors of `csd.kernels.verify.snapshot`
    S=None,
    M=None,
    tokens=None,
    words=None,
):
    """Follows the accepted path of one slot and writes its results."""
    BLOCK_A: tl.constexpr = C.BLOCK_A
    STOPS: tl.constexpr = C.STOPS
    s = tl.program_id(0)
    if out is not None:
        snapshot_rows(s, trees, out[0], S, M, C.A, C.HAS_TOP, C.HAS_TREES, C.BLOCK_R)
        if s >= S:
            return
    nodes = tl.load(pool.slot_nodes + s)
    # [MAX_NODES]
    i = tl.arange(0, MAX_NODES)
    mask = i < nodes
    row = tl.load(pool.slot_start + s) + i
    parent = tl.load(pool.parent + row, mask=mask, other=-1)
    drawn = tl.load(verdict.sample + parent, mask=mask & (parent >= 0), other=-1)
    match = mask & ((parent < 0) | (drawn == tl.load(pool.token + row, mask=mask, other=-2)))
    # bits of a slot are distinct, so their sum is their union
    one = tl.full([MAX_NODES], 1, tl.int64)
    word = tl.sum(tl.where(match, one << i.to(tl.int64), 0), 0)
    ancestors = tl.load(pool.ancestors + row, mask=mask, other=0)
    accepted = mask & ((ancestors & ~word) == 0)
    depth = tl.load(pool.depth + row, mask=mask, other=0)

    # [MAX_NODES, BLOCK_A], then [BLOCK_A]: the accepted path, root first
    offs_a = tl.arange(0, BLOCK_A)
    here = accepted[:, None] & (depth[:, None] == offs_a[None, :])
    path_row = tl.sum(tl.where(here, row[:, None], 0), 0)
    on_path = offs_a < tl.sum(accepted.to(tl.int32), 0)
    path = tl.load(verdict.sample + path_row, mask=on_path, other=-1)
    # [BLOCK_A, STOPS]
    stop_ids = tl.load(slots.stop_ids + s * STOPS + tl.arange(0, STOPS))
    ends = on_path & (tl.max((path[:, None] == stop_ids[None, :]).to(tl.int32), 1) > 0)
    until_end = tl.min(tl.where(ends, offs_a + 1, BLOCK_A + 1), 0)
    left = tl.load(slots.max_new + s) - tl.load(slots.generated + s)
    committed = tl.minimum(tl.minimum(tl.sum(on_path.to(tl.int32), 0), until_end), left)
    committed = tl.maximum(committed, 0)
    finish = tl.where(committed == left, LENGTH, RUNNING)
    finish = tl.where(until_end <= committed, STOP, finish)
    live = nodes > 0
    committed = tl.where(live, committed, 0)
    tl.store(verdict.accept_count + s, committed)
    finish = tl.where(live, finish, RUNNING)
    tl.store(verdict.finish + s, finish)
    path_row = tl.where(offs_a < committed, path_row, -1)
    tl.store(verdict.accept_row + s * C.A + offs_a, path_row, mask=offs_a < C.A)

    # rows beside the path, which no sample reaches, may be bad
    off = mask & ((accepted == 0) | (depth >= committed))
    bad = tl.max(tl.load(bad_row_ptr + row, mask=mask & (off == 0), other=0), 0) > 0
    tl.store(verdict.bad + s, bad)
    tl.store(verdict.raw_logprob + row, tl.zeros([MAX_NODES], tl.float32), mask=off)
    if tl.load(slots.temperature + s) == 0:
        tl.store(verdict.logprob + row, tl.zeros([MAX_NODES], tl.float32), mask=off)
    if out is not None:
        result = (path_row, path, committed, finish)
        advance_slot(s, result, verdict, advanced, tokens, words, C.N, C.BLOCK_N)
        snapshot_slot(
            s, result, bad, trees, verdict, out[0], out[1], S, M, C.A, C.HAS_TOP, C.HAS_TREES
        )
