"""Merge the partial results of an attention whose keys were split.

    out[m, h] = sum of w_i o_i / (sum of w_i + s),    w_i = 2^(lse_i - max lse)

over the partials i of row m, those of its prompt and those of its slot: merge[m] = (first row,
count) of the prompt's, then of the slot's. A tile's partials are `stride` rows apart, and the query
heads of a key-value head are adjacent. lse is in base 2. A row without partials gives zeros.

s = 2^(sinks[h] log2 e - max lse) if heads have sinks, which the maximum then includes, else 0.
"""

import torch
import triton
import triton.language as tl

from csd.kernels.attention.triton.tile import store_heads, tile_heads
from csd.kernels.common.operator import operator
from csd.state.record import check_tensor


def merge_partials_ref(
    o: torch.Tensor,  # [K, R, D] float32
    lse: torch.Tensor,  # [K, R] float32
    merge: torch.Tensor,  # [M, 4] int32
    stride: int,
    out: torch.Tensor,  # [M, H, D], written
    sinks: torch.Tensor | None = None,  # [H]
) -> torch.Tensor:
    """Plain PyTorch, row by row in float64. Writes and returns `out`."""
    K, each = o.shape[0], out.shape[1] // o.shape[0]
    for m, (prompt, prompt_splits, slot, slot_splits) in enumerate(merge.tolist()):
        places = [prompt + i * stride for i in range(prompt_splits)]
        places += [slot + i * stride for i in range(slot_splits)]
        if not places:
            out[m] = 0
            continue
        index = torch.tensor(places)[:, None] + torch.arange(each)
        # [K, splits, each]
        score = lse[:, index].double() * 0.6931471805599453
        if sinks is not None:
            score = torch.cat((score, sinks.double().view(K, 1, each)), 1)
        weight = torch.softmax(score, dim=1)[:, : len(places)]
        out[m] = (weight[..., None] * o[:, index].double()).sum(1).view(K * each, -1)
    return out


@triton.jit
def sinks_of(sinks_ptr, head, mask):
    """Maximum score (base 2) and sum of weights before any key: those of the sinks, if any."""
    if sinks_ptr is None:
        peak = tl.full(head.shape, float("-inf"), tl.float32)
        return peak, tl.zeros(head.shape, tl.float32)
    else:
        sink = tl.load(sinks_ptr + head, mask=mask, other=0.0).to(tl.float32)
        return sink * 1.4426950408889634, tl.full(head.shape, 1.0, tl.float32)


@triton.jit
def add_partial(
    acc, peak, total, lse_ptr, o_ptr, index, mask, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Adds partial results `index` [R] to acc [R, BLOCK_D], peak [R] and total [R]."""
    lse = tl.load(lse_ptr + index, mask=mask, other=float("-inf"))
    o = tile_heads(o_ptr, index * D, mask, D, BLOCK_D, tl.float32)
    top = tl.maximum(peak, lse)
    # a finite pivot keeps rows without a key so far from computing -inf - -inf
    pivot = tl.where(top == float("-inf"), 0.0, top)
    shrink = tl.exp2(peak - pivot)
    weight = tl.exp2(lse - pivot)
    return acc * shrink[:, None] + o * weight[:, None], top, total * shrink + weight


@triton.jit(do_not_specialize=["partial_rows"])
def merge_partials_kernel(
    o_ptr,  # [K, R, D] float32
    lse_ptr,  # [K, R] float32
    merge_ptr,  # [M, 4] int32
    out_ptr,  # [M, H, D]
    sinks_ptr,  # [H], or None
    partial_rows,
    EACH: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1).to(tl.int64)
    # [BLOCK_E]
    offs_e = tl.arange(0, BLOCK_E)
    mask_e = offs_e < EACH
    acc = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    peak, total = sinks_of(sinks_ptr, kv * EACH + offs_e, mask_e)
    for part in tl.static_range(2):
        first = kv * partial_rows + tl.load(merge_ptr + row * 4 + 2 * part)
        for i in range(tl.load(merge_ptr + row * 4 + 2 * part + 1)):
            # a loop over splits, not a block of offsets, so that nothing is reduced over splits
            index = first + i * STRIDE + offs_e
            acc, peak, total = add_partial(
                acc, peak, total, lse_ptr, o_ptr, index, mask_e, D, BLOCK_D
            )
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    index = (row * K + kv) * EACH + offs_e
    store_heads(out_ptr, acc, index * D, mask_e, D, BLOCK_D)


def merge_partials_triton(
    o: torch.Tensor,
    lse: torch.Tensor,
    merge: torch.Tensor,
    stride: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One launch; out must be contiguous."""
    (K, R, D), (M, H) = o.shape, out.shape[:2]
    merge_partials_kernel[(M, K)](
        o_ptr=o,
        lse_ptr=lse,
        merge_ptr=merge,
        out_ptr=out,
        sinks_ptr=sinks,
        partial_rows=R,
        EACH=H // K,
        K=K,
        D=D,
        STRIDE=stride,
        BLOCK_E=triton.next_power_of_2(H // K),
        BLOCK_D=triton.next_power_of_2(D),
        num_warps=4,
    )
    return out


_merge_partials = operator(
    "merge_partials", merge_partials_ref, merge_partials_triton, written=("out",)
)


def merge_partials(
    o: torch.Tensor,  # [K, R, D] float32
    lse: torch.Tensor,  # [K, R] float32
    merge: torch.Tensor,  # [M, 4] int32
    stride: int,
    out: torch.Tensor,  # [M, H, D], written
    sinks: torch.Tensor | None = None,  # [H]
) -> torch.Tensor:
    """Writes the merged attention to `out` and returns it."""
    whole = out.dim() == 3 == o.dim() and o.shape[0] and not out.shape[1] % o.shape[0]
    if not whole or out.shape[2] != o.shape[2]:
        raise ValueError(
            f"o must be [K, R, D] and out [M, H, D] with H a multiple of K, got {tuple(o.shape)} "
            f"and {tuple(out.shape)}"
        )
    check_tensor("o", o, o.shape, torch.float32, o.device)
    check_tensor("lse", lse, o.shape[:2], torch.float32, o.device)
    check_tensor("merge", merge, (out.shape[0], 4), torch.int32, o.device)
    check_tensor("out", out, out.shape, None, o.device)
    if sinks is not None:
        check_tensor("sinks", sinks, (out.shape[1],), None, o.device)
    _merge_partials(o, lse, merge, stride, out, sinks)
    return out
