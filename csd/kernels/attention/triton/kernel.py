"""The first launch of the tree attention: partial results of every segment of the work list.

The formula and the conventions are in `csd/kernels/attention/`, the work list is in `plan.py`, the
steps in a tile of rows in `tile.py`.
"""

import triton
import triton.language as tl

from csd.kernels.attention.triton.tile import (
    Tile,
    add_keys,
    no_keys,
    page_scores,
    put_partial,
    rows_of_heads,
    segment_of,
    tile_heads,
    tile_scores,
)


@triton.jit
def _attend_tile(
    tile,
    keys,  # tokens of the source, first of its nodes and their number: 0 if not in the segment
    part,  # 1 for a slot
    packed,
    BLOCK_R: tl.constexpr,
    DTYPE: tl.constexpr,
    C: tl.constexpr,
):
    """Writes the partial result of a segment for BLOCK_R packed rows of its tile, from `packed`."""
    operands, layout, work, strides = tile.operands, tile.layout, tile.work, tile.strides
    low, high, table_ptr = tile.segment.low, tile.segment.high, tile.segment.table_ptr
    length, node_first, nodes = keys
    BLOCK_N: tl.constexpr = C.BLOCK_N
    SUBS: tl.constexpr = C.PAGE // BLOCK_N
    offs_r, mask_r, row, q = rows_of_heads(tile, packed, BLOCK_R, DTYPE, C)
    acc, peak, total = no_keys(BLOCK_R, C.BLOCK_V)
    # [BLOCK_N]
    offs_n = tl.arange(0, BLOCK_N)
    # with a cap the scores are scaled already
    unit = 1.0 if C.CAP else tile.scale
    pages = tl.cdiv(length, C.PAGE)
    end = tl.minimum(high, pages) * SUBS
    page = tl.load(table_ptr + low, mask=low < pages, other=0)
    # full pages need no mask, which takes a quarter of a page's instructions
    whole = tl.maximum(tl.minimum(length // C.PAGE, high), low) * SUBS
    if work.first is not None:
        # [BLOCK_R, 1]: the first key of this source that a row attends to
        since = tl.load(work.first + row * 2 + part, mask=mask_r, other=0)[:, None]
        whole = low * SUBS
    for i in range(low * SUBS, whole):
        score, v, page = page_scores(tile, q, page, i, end, None, DTYPE, C)
        acc, peak, total = add_keys(acc, peak, total, score, v, unit, C)
    for i in range(whole, end):
        token = i * BLOCK_N + offs_n
        mask_n = token < length
        score, v, page = page_scores(tile, q, page, i, end, mask_n, DTYPE, C)
        seen = mask_n[None, :]
        if work.first is not None:
            seen &= token[None, :] >= since
        score = tl.where(seen, score, float("-inf"))
        acc, peak, total = add_keys(acc, peak, total, score, v, unit, C)

    # [BLOCK_R, 1]
    word = tl.load(layout.ancestors + row, mask=mask_r & (nodes > 0), other=0)[:, None]
    # seldom more than one iteration, so more stages would only add code
    for j in tl.range(0, nodes, BLOCK_N, num_stages=2):
        node = j + offs_n
        mask_n = node < nodes
        node_row = (node_first + node).to(tl.int64)
        # [BLOCK_N, ..]
        at = node_row * strides.node + tile.kv * C.D
        k = tile_heads(operands.node_k, at, mask_n, C.D, C.BLOCK_D, DTYPE)
        if C.DV != C.D:
            at = node_row * strides.node_v + tile.kv * C.DV
        v = tile_heads(operands.node_v, at, mask_n, C.DV, C.BLOCK_V, DTYPE)
        # [BLOCK_R, BLOCK_N]
        score = tile_scores(q, k, tile.scale, tile.cap, C)
        seen = ((word >> node[None, :].to(tl.int64)) & 1) == 1
        score = tl.where(seen & mask_n[None, :], score, float("-inf"))
        acc, peak, total = add_keys(acc, peak, total, score, v, unit, C)
    put_partial(tile, offs_r, mask_r, acc, peak, total, unit, C)


@triton.jit(do_not_specialize=["G", "prompt_width", "slot_width", "partial_rows"])
def tree_attention_kernel(
    operands,
    layout,  # with a window, `ancestors` has the nodes that a row attends to
    work,
    partials,  # out
    strides,
    G,
    prompt_width,
    slot_width,
    partial_rows,
    scale,  # times log2 e; with a cap, divided by it instead
    cap,  # times log2 e
    DTYPE: tl.constexpr,
    C: tl.constexpr,
):
    K: tl.constexpr = C.K
    EACH: tl.constexpr = C.H // K
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_SMALL: tl.constexpr = C.BLOCK_SMALL
    # neighbouring programs read neighbouring heads of the same tokens
    pid = tl.program_id(0) // K
    kv = tl.program_id(0) % K
    before = kv.to(tl.int64) * partial_rows
    results = (partials.o + before * C.DV, partials.lse + before)
    segment_last = tl.load(work.program + pid * 2 + 1)
    for w in range(tl.load(work.program + pid * 2), segment_last):
        segment = segment_of(layout, work, w, G, prompt_width, slot_width)
        source = segment.source
        is_slot = source >= G
        slot = source - G
        prompt_len = tl.load(layout.prompt_len + source, mask=source < G, other=0)
        slot_len = tl.load(layout.slot_len + slot, mask=is_slot, other=0)
        length = tl.where(is_slot, slot_len, prompt_len)
        node_first = tl.load(layout.slot_start + slot, mask=is_slot, other=0)
        nodes = tl.load(layout.slot_nodes + slot, mask=is_slot, other=0)
        # the unit after the last page is the slot's nodes
        nodes = tl.where(segment.high > tl.cdiv(length, C.PAGE), nodes, 0)
        keys = (length, node_first, nodes)
        part = is_slot.to(tl.int32)
        tile = Tile(operands, layout, work, results, strides, segment, kv, scale, cap)
        packed_rows = segment.rows * EACH
        if BLOCK_M < C.PAGE:
            for packed in range(0, packed_rows, BLOCK_M):
                _attend_tile(tile, keys, part, packed, BLOCK_M, DTYPE, C)
        elif packed_rows <= BLOCK_SMALL:
            _attend_tile(tile, keys, part, 0, BLOCK_SMALL, DTYPE, C)
        else:
            _attend_tile(tile, keys, part, 0, BLOCK_M, DTYPE, C)
