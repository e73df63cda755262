"""The first launch of the tree attention: partial results of every segment of the work list.

The formula and the conventions are in `csd/kernels/attention/`, the work list is in `plan.py`. The
steps in a tile of rows are functions of their own, which `exact.py` also calls: `_tokens` loads
keys or values, `_scores` multiplies, `_add_keys` is one step of the online softmax.
"""

import triton
import triton.language as tl


@triton.jit
def _tokens(
    pages_ptr,
    start,
    kv,
    offs_n,
    mask_n,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """[BLOCK_N, BLOCK_D]: a head's keys or values from place `start` on, 0 where masked.

    Memory after the last valid token may be NaN, and 0 * NaN is not 0. mask_n: None for no mask.
    """
    # [BLOCK_D]
    offs_d = tl.arange(0, BLOCK_D)
    # [BLOCK_N, BLOCK_D]: 32-bit offsets from one pointer that all elements share
    offs = offs_n[:, None] * (K * D) + offs_d[None, :]
    ptrs = pages_ptr + (start * (K * D) + kv * D) + offs
    if mask_n is not None:
        x = tl.load(ptrs, mask=mask_n[:, None] & (offs_d < D)[None, :], other=0.0)
    elif BLOCK_D == D:
        x = tl.load(ptrs)
    else:
        x = tl.load(ptrs, mask=(offs_d < D)[None, :], other=0.0)
    return x.to(DTYPE)


@triton.jit
def _tanh(x):
    """tanh to two units in the last place, which 1 - 2 / (e^2x + 1) does not reach near zero."""
    z = x * x
    # least squares of the relative error up to 0.625
    p = tl.fma(z, -5.71705e-3, 2.0650593e-2)
    p = tl.fma(tl.fma(tl.fma(p, z, -5.37435e-2), z, 0.13331491), z, -0.33333284)
    near = tl.fma(x * z, p, x)
    far = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * 2.8853900817779268) + 1.0)
    return tl.where(tl.abs(x) < 0.6, near, tl.where(x > 0.0, far, -far))


@triton.jit
def _scores(q, k, scale, cap, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """[R, N]: unscaled scores; with CAP scaled and capped, in base 2 if `cap` is times log2 e."""
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CAP:
        return cap * _tanh(score * scale)
    else:
        return score


@triton.jit
def _add_keys(acc, peak, total, score, v, scale, PRECISION: tl.constexpr):
    """One step of the online softmax: acc [R, D], peak [R], total [R], score [R, N], v [N, D].

    Scores and their peak are unscaled: one fma subtracts the peak and applies `scale`.
    """
    top = tl.maximum(peak, tl.max(score, 1))
    # a finite pivot keeps a row without a key so far from computing -inf - -inf
    pivot = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(tl.fma(score, scale, (-pivot * scale)[:, None]))
    # exactly 1 if the peak does not change
    shrink = tl.exp2((peak - pivot) * scale)
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, top, total


@triton.jit
def _attend_tile(
    pointers,
    first_ptr,
    results,
    strides,
    segment,
    keys,
    packed,
    kv,
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
    """Writes the partial result of a segment for BLOCK_R packed rows of its tile, from `packed`."""
    q_ptr, node_k_ptr, node_v_ptr, k_pages_ptr, v_pages_ptr, ancestors_ptr = pointers
    o_ptr, lse_ptr = results
    q_stride, node_stride, node_v_stride = strides
    first, rows, low, high, base = segment
    # row of the page table and tokens of the source; nodes is 0 if none are in the segment
    table_ptr, length, node_first, nodes, part = keys
    EACH: tl.constexpr = H // K
    SUBS: tl.constexpr = PAGE // BLOCK_N
    # [BLOCK_R]
    offs_r = packed + tl.arange(0, BLOCK_R)
    mask_r = offs_r < rows * EACH
    row = first + offs_r // EACH
    head = kv * EACH + offs_r % EACH
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
    pages = tl.cdiv(length, PAGE)
    end = tl.minimum(high, pages) * SUBS
    # the page of the next step is loaded a step ahead, so that its latency is not in the loop
    page = tl.load(table_ptr + low, mask=low < pages, other=0)
    # full pages need no mask, which takes a quarter of a page's instructions
    whole = tl.maximum(tl.minimum(length // PAGE, high), low) * SUBS
    if first_ptr is not None:
        # [BLOCK_R, 1]: the first key of this source that a row attends to
        since = tl.load(first_ptr + row * 2 + part, mask=mask_r, other=0)[:, None]
        whole = low * SUBS
    for i in range(low * SUBS, whole):
        start = page.to(tl.int64) * PAGE + (i % SUBS) * BLOCK_N
        page = tl.load(table_ptr + (i + 1) // SUBS, mask=i + 1 < end, other=0)
        k = _tokens(k_pages_ptr, start, kv, offs_n, None, K, D, BLOCK_D, DTYPE)
        v = _tokens(v_pages_ptr, start, kv, offs_n, None, K, DV, BLOCK_V, DTYPE)
        # [BLOCK_R, BLOCK_N]
        score = _scores(q, k, scale, cap, CAP, PRECISION)
        acc, peak, total = _add_keys(acc, peak, total, score, v, unit, PRECISION)
    for i in range(whole, end):
        token = i * BLOCK_N + offs_n
        mask_n = token < length
        start = page.to(tl.int64) * PAGE + (i % SUBS) * BLOCK_N
        page = tl.load(table_ptr + (i + 1) // SUBS, mask=i + 1 < end, other=0)
        k = _tokens(k_pages_ptr, start, kv, offs_n, mask_n, K, D, BLOCK_D, DTYPE)
        v = _tokens(v_pages_ptr, start, kv, offs_n, mask_n, K, DV, BLOCK_V, DTYPE)
        # [BLOCK_R, BLOCK_N]
        score = _scores(q, k, scale, cap, CAP, PRECISION)
        if first_ptr is not None:
            seen = mask_n[None, :] & (token[None, :] >= since)
            score = tl.where(seen, score, float("-inf"))
        else:
            score = tl.where(mask_n[None, :], score, float("-inf"))
        acc, peak, total = _add_keys(acc, peak, total, score, v, unit, PRECISION)

    # [BLOCK_R, 1]
    word = tl.load(ancestors_ptr + row, mask=mask_r & (nodes > 0), other=0)[:, None]
    # seldom more than one iteration, so more stages would only add code
    for j in tl.range(0, nodes, BLOCK_N, num_stages=2):
        node = j + offs_n
        mask_n = node < nodes
        # [BLOCK_N, 1]
        node_row = (node_first + node)[:, None].to(tl.int64)
        offs = node_row * node_stride + kv * D + offs_d[None, :]
        k = tl.load(node_k_ptr + offs, mask=mask_n[:, None] & mask_d[None, :], other=0.0).to(DTYPE)
        if DV != D:
            offs = node_row * node_v_stride + kv * DV + offs_v[None, :]
        v = tl.load(node_v_ptr + offs, mask=mask_n[:, None] & mask_v[None, :], other=0.0).to(DTYPE)
        # [BLOCK_R, BLOCK_N]
        score = _scores(q, k, scale, cap, CAP, PRECISION)
        seen = ((word >> node[None, :].to(tl.int64)) & 1) == 1
        score = tl.where(seen & mask_n[None, :], score, float("-inf"))
        acc, peak, total = _add_keys(acc, peak, total, score, v, unit, PRECISION)

    # a row without a key (only sub-blocks of other branches, or all before its window) has weight 0
    # in the merge
    total = tl.where(total > 0.0, total, 1.0)
    index = base + offs_r
    tl.store(
        o_ptr + index[:, None].to(tl.int64) * DV + offs_v[None, :],
        acc * (1.0 / total)[:, None],
        mask=mask_r[:, None] & mask_v[None, :],
    )
    tl.store(lse_ptr + index, peak * unit + tl.log2(total), mask=mask_r)


@triton.jit(do_not_specialize=["G", "prompt_width", "slot_width", "partial_rows"])
def _tree_attention_kernel(
    q_ptr,  # [M, H, D]
    node_k_ptr,  # [M, K, D]
    node_v_ptr,  # [M, K, DV]
    k_pages_ptr,  # [n_pages, PAGE, K, D]
    v_pages_ptr,  # [n_pages, PAGE, K, DV]
    prompt_pages_ptr,  # [G, PP] int32
    prompt_len_ptr,  # [G] int32
    slot_pages_ptr,  # [S, SP] int32
    slot_len_ptr,  # [S] int32
    ancestors_ptr,  # [M] int64; with a window, the nodes that a row attends to
    first_ptr,  # [M, 2] int32 of `first_keys`, or None
    slot_start_ptr,  # [S] int32
    slot_nodes_ptr,  # [S] int32
    segment_ptr,  # [W, 6] int32
    program_ptr,  # [programs, 2] int32
    o_ptr,  # [K, partial rows, DV] float32
    lse_ptr,  # [K, partial rows] float32
    q_stride,
    node_stride,
    node_v_stride,
    G,
    prompt_width,
    slot_width,
    partial_rows,
    scale,  # times log2 e; with a cap, divided by it instead
    cap,  # times log2 e
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_SMALL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
):
    EACH: tl.constexpr = H // K
    # neighbouring programs read neighbouring heads of the same tokens
    pid = tl.program_id(0) // K
    kv = tl.program_id(0) % K
    o_ptr += kv.to(tl.int64) * partial_rows * DV
    lse_ptr += kv.to(tl.int64) * partial_rows
    segment_last = tl.load(program_ptr + pid * 2 + 1)
    for w in range(tl.load(program_ptr + pid * 2), segment_last):
        first = tl.load(segment_ptr + w * 6)
        rows = tl.load(segment_ptr + w * 6 + 1)
        source = tl.load(segment_ptr + w * 6 + 2)
        low = tl.load(segment_ptr + w * 6 + 3)
        high = tl.load(segment_ptr + w * 6 + 4)
        base = tl.load(segment_ptr + w * 6 + 5)
        is_slot = source >= G
        slot = source - G
        prompt_len = tl.load(prompt_len_ptr + source, mask=source < G, other=0)
        slot_len = tl.load(slot_len_ptr + slot, mask=is_slot, other=0)
        length = tl.where(is_slot, slot_len, prompt_len)
        node_first = tl.load(slot_start_ptr + slot, mask=is_slot, other=0)
        nodes = tl.load(slot_nodes_ptr + slot, mask=is_slot, other=0)
        # the unit after the last page is the slot's nodes
        nodes = tl.where(high > tl.cdiv(length, PAGE), nodes, 0)
        if is_slot:
            table_ptr = slot_pages_ptr + slot.to(tl.int64) * slot_width
        else:
            table_ptr = prompt_pages_ptr + source.to(tl.int64) * prompt_width
        pointers = (q_ptr, node_k_ptr, node_v_ptr, k_pages_ptr, v_pages_ptr, ancestors_ptr)
        results = (o_ptr, lse_ptr)
        strides = (q_stride, node_stride, node_v_stride)
        segment = (first, rows, low, high, base)
        keys = (table_ptr, length, node_first, nodes, is_slot.to(tl.int32))
        if BLOCK_M < PAGE:
            for packed in range(0, rows * EACH, BLOCK_M):
                _attend_tile(
                    pointers,
                    first_ptr,
                    results,
                    strides,
                    segment,
                    keys,
                    packed,
                    kv,
                    scale,
                    cap,
                    H,
                    K,
                    D,
                    DV,
                    PAGE,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_D,
                    BLOCK_V,
                    DTYPE,
                    PRECISION,
                    CAP,
                )
        elif rows * EACH <= BLOCK_SMALL:
            _attend_tile(
                pointers,
                first_ptr,
                results,
                strides,
                segment,
                keys,
                0,
                kv,
                scale,
                cap,
                H,
                K,
                D,
                DV,
                PAGE,
                BLOCK_SMALL,
                BLOCK_N,
                BLOCK_D,
                BLOCK_V,
                DTYPE,
                PRECISION,
                CAP,
            )
        else:
            _attend_tile(
                pointers,
                first_ptr,
                results,
                strides,
                segment,
                keys,
                0,
                kv,
                scale,
                cap,
                H,
                K,
                D,
                DV,
                PAGE,
                BLOCK_M,
                BLOCK_N,
                BLOCK_D,
                BLOCK_V,
                DTYPE,
                PRECISION,
                CAP,
            )
