"""The kernel of `commit_kv`."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class Layers(NamedTuple):
    """Keys and values of all layers, or elements from a layer to the next."""

    node_k: Any  # [L, M, W], W = K * D
    node_v: Any  # [L, M, WV], WV = K * Dv
    k_pages: Any  # [L, n_pages, PAGE, W]
    v_pages: Any  # [L, n_pages, PAGE, WV]


class Accepted(NamedTuple):
    """The slots' pages and tokens, and the rows that they accept."""

    pages: torch.Tensor  # [S, SP] int32
    len: torch.Tensor  # [S] int32
    row: torch.Tensor  # [S, A] int32
    count: torch.Tensor  # [S] int32


@triton.jit(do_not_specialize=["slot_width", "A"])
def commit_kv_kernel(
    layers,  # written: pages
    slots,
    strides,
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
    count = tl.minimum(tl.load(slots.count + slot), A)
    if tl.program_id(2) * BLOCK_A >= count:
        return
    accepted = i < count
    row = tl.load(slots.row + slot * A + i, mask=accepted, other=0).to(tl.int64)
    position = tl.load(slots.len + slot) + i
    if MOVED:
        position -= tl.load(slots.count + slot)
    page = tl.load(slots.pages + slot * slot_width + position // PAGE, mask=accepted, other=0)
    token = page.to(tl.int64) * PAGE + position % PAGE
    source = (layer * strides.node_k + row * W)[:, None]
    source_v = (layer * strides.node_v + row * WV)[:, None]
    target = (layer * strides.k_pages + token * W)[:, None]
    target_v = (layer * strides.v_pages + token * WV)[:, None]
    for w in range(0, max(W, WV), BLOCK_W):
        # [BLOCK_A, BLOCK_W]
        offs_w = w + tl.arange(0, BLOCK_W)[None, :]
        mask = accepted[:, None] & (offs_w < W)
        mask_v = accepted[:, None] & (offs_w < WV)
        k = tl.load(layers.node_k + source + offs_w, mask=mask)
        v = tl.load(layers.node_v + source_v + offs_w, mask=mask_v)
        tl.store(layers.k_pages + target + offs_w, k, mask=mask)
        tl.store(layers.v_pages + target_v + offs_w, v, mask=mask_v)
