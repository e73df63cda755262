"""Kernels of `tree_conv` and `commit_tail`."""

import triton
import triton.language as tl


@triton.jit
def tree_conv_kernel(
    x_ptr,  # [M, C]
    weight_ptr,  # [C, W]
    bias_ptr,  # [C], or None
    tail_ptr,  # [S, W - 1, C]
    slot_ptr,  # [M] int32
    position_ptr,  # [M] int32
    path_ptr,  # [M, DEPTHS] int32
    y_ptr,  # [M, C]
    C: tl.constexpr,
    W: tl.constexpr,
    DEPTHS: tl.constexpr,
    SILU: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    # [BLOCK_C]
    offs = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = offs < C
    y = tl.zeros([BLOCK_C], WIDE)
    slot = tl.load(slot_ptr + m).to(tl.int64)
    if slot >= 0:
        # [BLOCK_D]
        offs_d = tl.arange(0, BLOCK_D)
        path = tl.load(path_ptr + m * DEPTHS + offs_d, mask=offs_d < DEPTHS, other=-1)
        depth = tl.sum((path >= 0).to(tl.int32), 0) - 1
        position = tl.load(position_ptr + m)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + offs, mask=mask, other=0.0).to(WIDE)
        for step in tl.static_range(W):
            back = W - 1 - step
            row_above = tl.sum(tl.where(offs_d == depth - back, path, 0), 0)
            node = depth >= back
            values = tl.load(x_ptr + row_above.to(tl.int64) * C + offs, mask=mask & node, other=0.0)
            values = values.to(WIDE)
            if back > 0:
                p = position - back
                index = slot * (W - 1) + tl.maximum(p, 0) % (W - 1)
                there = mask & (depth < back) & (p >= 0)
                values += tl.load(tail_ptr + index * C + offs, mask=there, other=0.0).to(WIDE)
            weight = tl.load(weight_ptr + offs * W + step, mask=mask, other=0.0)
            y += weight.to(WIDE) * values
        if SILU:
            y = y.to(y_ptr.dtype.element_ty).to(WIDE)
            y = y / (1.0 + tl.exp(-y))
    tl.store(y_ptr + m * C + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["A", "S"])
def commit_tail_kernel(
    node_ptr,  # [L, M, F]
    tail_ptr,  # [L, S, R, F]
    slot_len_ptr,  # [S] int32
    accept_row_ptr,  # [S, A] int32
    accept_count_ptr,  # [S] int32
    node_stride,
    S,
    A,
    R: tl.constexpr,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
):
    layer, s = tl.program_id(0) // S, tl.program_id(0) % S
    count = tl.load(accept_count_ptr + s)
    first = tl.load(slot_len_ptr + s) - count
    # [BLOCK]
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < F
    for i in range(tl.maximum(count - R, 0), count):
        row = tl.load(accept_row_ptr + s * A + i).to(tl.int64)
        x = tl.load(node_ptr + layer.to(tl.int64) * node_stride + row * F + offs, mask=mask)
        offset = tl.program_id(0).to(tl.int64) * R + (first + i) % R
        tl.store(tail_ptr + offset * F + offs, x, mask=mask)
