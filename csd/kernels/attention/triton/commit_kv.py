"""The kernel of `commit_kv`."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["slot_width", "A"])
def _commit_kv_kernel(
    node_k_ptr,  # [L, M, W], W = K * D
    node_v_ptr,  # [L, M, WV], WV = K * Dv
    k_pages_ptr,  # [L, n_pages, PAGE, W]
    v_pages_ptr,  # [L, n_pages, PAGE, WV]
    slot_pages_ptr,  # [S, SP] int32
    slot_len_ptr,  # [S] int32
    accept_row_ptr,  # [S, A] int32
    accept_count_ptr,  # [S] int32
    node_k_stride,  # elements from a layer to the next
    node_v_stride,
    k_pages_stride,
    v_pages_stride,
    slot_width,
    A,
    MOVED: tl.constexpr,
    W: tl.constexpr,
    WV: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    # [BLOCK_A]
    i = tl.program_id(2) * BLOCK_A + tl.arange(0, BLOCK_A)
    count = tl.minimum(tl.load(accept_count_ptr + slot), A)
    if tl.program_id(2) * BLOCK_A >= count:
        return
    accepted = i < count
    row = tl.load(accept_row_ptr + slot * A + i, mask=accepted, other=0).to(tl.int64)
    position = tl.load(slot_len_ptr + slot) + i
    if MOVED:
        position -= tl.load(accept_count_ptr + slot)
    page = tl.load(slot_pages_ptr + slot * slot_width + position // PAGE, mask=accepted, other=0)
    token = page.to(tl.int64) * PAGE + position % PAGE
    source = (layer * node_k_stride + row * W)[:, None]
    source_v = (layer * node_v_stride + row * WV)[:, None]
    target = (layer * k_pages_stride + token * W)[:, None]
    target_v = (layer * v_pages_stride + token * WV)[:, None]
    for w in range(0, max(W, WV), BLOCK_W):
        # [BLOCK_A, BLOCK_W]
        offs_w = w + tl.arange(0, BLOCK_W)[None, :]
        mask = accepted[:, None] & (offs_w < W)
        mask_v = accepted[:, None] & (offs_w < WV)
        k = tl.load(node_k_ptr + source + offs_w, mask=mask)
        v = tl.load(node_v_ptr + source_v + offs_w, mask=mask_v)
        tl.store(k_pages_ptr + target + offs_w, k, mask=mask)
        tl.store(v_pages_ptr + target_v + offs_w, v, mask=mask_v)
