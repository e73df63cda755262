"""The first launch of the exact attention: a partial result of every segment of the work list."""

import triton
import triton.language as tl

from csd.kernels.tree_attention.online import _add_keys, _scores, _tokens


@triton.jit
def _attend_segment(
    pointers,
    first_ptr,
    results,
    segment,
    table_ptr,
    limit,
    packed,
    kv,
    q_stride,
    scale,
    cap,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
):
    """Writes the partial result of a segment for BLOCK_R packed rows of its tile, from `packed` on.

    limit: tokens of a prompt; -1 for a slot, where each row has its own limit.
    """
    q_ptr, k_pages_ptr, v_pages_ptr, row_ptr = pointers
    o_ptr, lse_ptr = results
    first, rows, low, high, base = segment
    EACH: tl.constexpr = H // K
    SUBS: tl.constexpr = PAGE // BLOCK_N
    # [BLOCK_R]
    offs_r = packed + tl.arange(0, BLOCK_R)
    mask_r = offs_r < rows * EACH
    row = first + offs_r // EACH
    head = kv * EACH + offs_r % EACH
    own = tl.load(row_ptr + row * 6 + 2, mask=mask_r & (limit < 0), other=0)
    # [BLOCK_R, 1]: end of the tokens that a row attends to
    sees = tl.where(limit < 0, own, limit)[:, None]
    most = tl.max(sees)
    if first_ptr is not None:
        # [BLOCK_R, 1]: the first token that it attends to
        part = (limit < 0).to(tl.int32)
        since = tl.load(first_ptr + row * 2 + part, mask=mask_r, other=0)[:, None]
    # [BLOCK_D]
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    # [BLOCK_V]
    offs_v = tl.arange(0, BLOCK_V)
    mask_v = offs_v < DV
    # [BLOCK_N]
    offs_n = tl.arange(0, BLOCK_N)
    # [BLOCK_R, BLOCK_D]
    q = tl.load(
        q_ptr + row[:, None].to(tl.int64) * q_stride + head[:, None] * D + offs_d[None, :],
        mask=mask_r[:, None] & mask_d[None, :],
        other=0.0,
    ).to(DTYPE)
    acc = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    peak = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    # with a cap the scores are scaled already
    unit = 1.0 if CAP else scale
    end = high * SUBS
    # the page of the next step is loaded a step ahead, so that its latency is not in the loop
    page = tl.load(table_ptr + low)
    for i in range(low * SUBS, end):
        token = i * BLOCK_N + offs_n
        # tokens that no row attends to may be NaN, and 0 * NaN is not 0
        mask_n = token < most
        start = page.to(tl.int64) * PAGE + (i % SUBS) * BLOCK_N
        page = tl.load(table_ptr + (i + 1) // SUBS, mask=i + 1 < end, other=0)
        k = _tokens(k_pages_ptr, start, kv, offs_n, mask_n, K, D, BLOCK_D, DTYPE)
        v = _tokens(v_pages_ptr, start, kv, offs_n, mask_n, K, DV, BLOCK_V, DTYPE)
        # [BLOCK_R, BLOCK_N]
        score = _scores(q, k, scale, cap, CAP, PRECISION)
        seen = token[None, :] < sees
        if first_ptr is not None:
            seen &= token[None, :] >= since
        score = tl.where(seen, score, float("-inf"))
        acc, peak, total = _add_keys(acc, peak, total, score, v, unit, PRECISION)

    total = tl.where(total > 0.0, total, 1.0)
    at = base + offs_r
    tl.store(
        o_ptr + at[:, None].to(tl.int64) * DV + offs_v[None, :],
        acc * (1.0 / total)[:, None],
        mask=mask_r[:, None] & mask_v[None, :],
    )
    tl.store(lse_ptr + at, peak * unit + tl.log2(total), mask=mask_r)


@triton.jit(do_not_specialize=["G", "prompt_width", "slot_width", "partial_rows", "programs"])
def _pages_kernel(
    q_ptr,  # [M, H, D]
    k_pages_ptr,  # [n_pages, PAGE, K, D]
    v_pages_ptr,  # [n_pages, PAGE, K, DV]
    prompt_pages_ptr,  # [G, PP] int32
    prompt_len_ptr,  # [G] int32
    slot_pages_ptr,  # [S, SP] int32
    segment_ptr,  # [W, 6] int32
    count_ptr,  # [1] int32
    row_ptr,  # [M, 6] int32
    first_ptr,  # [M, 2] int32 of `first_keys`, or None
    o_ptr,  # [K, partial rows, DV] float32
    lse_ptr,  # [K, partial rows] float32
    q_stride,
    G,
    prompt_width,
    slot_width,
    partial_rows,
    programs,
    scale,  # times log2 e; with a cap, divided by it instead
    cap,  # times log2 e
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
):
    EACH: tl.constexpr = H // K
    # neighbouring programs read neighbouring heads of the same tokens
    kv = tl.program_id(0) % K
    o_ptr += kv.to(tl.int64) * partial_rows * DV
    lse_ptr += kv.to(tl.int64) * partial_rows
    count = tl.load(count_ptr)
    for w in range(tl.program_id(0) // K, count, programs):
        first = tl.load(segment_ptr + w * 6)
        rows = tl.load(segment_ptr + w * 6 + 1)
        source = tl.load(segment_ptr + w * 6 + 2)
        low = tl.load(segment_ptr + w * 6 + 3)
        high = tl.load(segment_ptr + w * 6 + 4)
        base = tl.load(segment_ptr + w * 6 + 5)
        limit = tl.load(prompt_len_ptr + source, mask=source < G, other=-1)
        if source >= G:
            table_ptr = slot_pages_ptr + (source - G).to(tl.int64) * slot_width
        else:
            table_ptr = prompt_pages_ptr + source.to(tl.int64) * prompt_width
        pointers = (q_ptr, k_pages_ptr, v_pages_ptr, row_ptr)
        results = (o_ptr, lse_ptr)
        segment = (first, rows, low, high, base)
        if BLOCK_M < PAGE:
            for packed in range(0, rows * EACH, BLOCK_M):
                _attend_segment(
                    pointers, first_ptr, results, segment, table_ptr, limit, packed, kv, q_stride,
                    scale, cap,
                    H, K, D, DV, PAGE, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, DTYPE, PRECISION, CAP,
                )  # fmt: skip
        else:
            _attend_segment(
                pointers, first_ptr, results, segment, table_ptr, limit, 0, kv, q_stride, scale,
                cap,
                H, K, D, DV, PAGE, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, DTYPE, PRECISION, CAP,
            )  # fmt: skip
