"""The kernels of a snapshot; a fused verification calls their parts."""

import triton
import triton.language as tl


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
        me, depth_ptr, cost_ptr, source_ptr, token_ptr, parent_ptr, ints_ptr, S, M, A, TOP,
        HAS_TOP, HAS_TREES, BLOCK_R,
    )  # fmt: skip
    if me >= S:
        return
    # [BLOCK_A]
    a = tl.arange(0, BLOCK_A)
    row = tl.load(accept_row_ptr + me * A + a, mask=a < A, other=-1)
    token = tl.load(sample_ptr + row, mask=row >= 0, other=-1)
    snapshot_slot(
        me, row, token, tl.load(accept_count_ptr + me), tl.load(finish_ptr + me),
        tl.load(bad_ptr + me), slot_start_ptr, slot_nodes_ptr, source_ptr, logprob_ptr,
        raw_logprob_ptr, top_token_ptr, top_prob_ptr, ints_ptr, floats_ptr, S, M, A, TOP, HAS_TOP,
        HAS_TREES,
    )  # fmt: skip
