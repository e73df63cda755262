"""The kernel of `csd/kernels/snapshot.py`: a program takes a slot, and BLOCK_R rows of the pool."""

import triton
import triton.language as tl


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
    kept = tl.load(accept_row_ptr + to, mask=mask, other=-1)
    row = tl.maximum(kept, 0)
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
        tl.store(ints_ptr + trees + S + 4 * M + to, kept, mask=mask)
