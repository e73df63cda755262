"""The kernel of the packed attention: one program per tile of rows and key-value head.

The formula is in `csd/kernels/attention/packed/`, the lists of blocks in
`plan_packed`. Scores are in base 2 (scale times log2 e), lse is stored as a natural logarithm.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from csd.kernels.attention.packed.layout import PackedLayout
from csd.kernels.attention.packed.triton.tile import (
    LN2,
    LOG2E,
    PackedOperands,
    packed_block_keys,
    packed_tile_rows,
    sees_keys,
)
from csd.kernels.attention.triton.launch import DTYPES
from csd.kernels.attention.triton.tile import Tiles, add_keys, no_keys, store_heads, tile_scores
from csd.kernels.common.gpu import Chip, chip_of


class PackedWork(NamedTuple):
    """Lists of a layout: T tiles of rows, B blocks of keys."""

    first: torch.Tensor | None  # [R] int32, first position that a row attends to
    visits: torch.Tensor  # [T, B] int32, blocks of a tile, the first `visit_count` of a row
    visit_count: torch.Tensor  # [T] int32
    readers: torch.Tensor  # [B, T] int32, tiles of a block
    reader_count: torch.Tensor  # [B] int32


def plan_packed(
    end: torch.Tensor,  # [R] int32
    position: torch.Tensor,  # [R] int32
    rows: int,
    keys: int,
    window: int | None,
    chunk: int | None,
) -> PackedWork:
    """Pairs of tiles of rows and blocks of keys to multiply. rows: of a tile. keys: of a block.

    A tile has some rows and, for one key-value head, their query heads. A pair is visited if a row
    of the tile may attend to a key of the block: by the ends of the block's rows, and with a window
    or a chunk by the first position that each row attends to. PyTorch computes the lists without
    reading the device.
    """
    R, first = end.shape[0], None
    index = torch.arange(R, device=end.device, dtype=torch.int32)
    # the last row of a tile and the largest end of a block, by tile and block
    seen = (index[::keys] <= _largest(index, rows)[:, None]) & (
        _largest(end, keys) > index[::rows, None]
    )
    if window is not None or chunk is not None:
        first = torch.zeros_like(position)
        if window is not None:
            first = torch.maximum(first, position - (window - 1))
        if chunk is not None:
            first = torch.maximum(first, position - position % chunk)
        seen &= _largest(position, keys) >= -_largest(-first, rows)[:, None]
    lists = [part for pairs in (seen, seen.T) for part in _listed(pairs)]
    return PackedWork(first, *lists)


def _largest(x: torch.Tensor, size: int) -> torch.Tensor:
    """The largest number of each run of `size` numbers, the last run possibly shorter."""
    count = -(-x.shape[0] // size)
    index = torch.arange(count * size, device=x.device).clamp(max=x.shape[0] - 1)
    return x[index].view(count, size).amax(1)


def _listed(pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of the True ones of each row, in order and first, and their number."""
    order = torch.sort((~pairs).to(torch.int8), dim=1, stable=True)[1]
    # for a transposed matrix the order is one too
    return order.int().contiguous(), pairs.sum(1, dtype=torch.int32)


@triton.jit
def packed_attention_kernel(
    operands,
    layout,
    work,
    sinks_ptr,  # [H], or None
    out_ptr,  # [R, H, DV]
    lse_ptr,  # [R, H] float32
    R,
    B,
    scale,  # times log2 e; with a cap, divided by it instead
    cap,  # times log2 e
    ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
    C: tl.constexpr,
):
    tile = tl.program_id(0)
    kv = tl.program_id(1)
    rows = packed_tile_rows(operands, work, tile, kv, R, ROWS, DTYPE, C)
    # with a cap the scores are scaled already
    unit = 1.0 if C.CAP else scale
    acc, peak, total = no_keys(C.BLOCK_M, C.BLOCK_V)
    for i in range(0, tl.load(work.visit_count + tile)):
        block = tl.load(work.visits + tile * B + i)
        keys = packed_block_keys(operands, layout, work, block, kv, R, DTYPE, C)
        # [BLOCK_M, BLOCK_N]
        score = tile_scores(rows.q, keys.k, scale, cap, C)
        score = tl.where(sees_keys(work, rows, keys, 1), score, float("-inf"))
        acc, peak, total = add_keys(acc, peak, total, score, keys.v, unit, C)
    # rows of no tile have no key
    total = tl.where(total > 0.0, total, 1.0)
    index, mask = rows.index, rows.mask
    lse = tl.where(mask, peak * unit, 0.0) + tl.log2(total)
    weight = 1.0 / total
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + rows.head, mask=mask, other=0.0).to(tl.float32) * LOG2E
        top = tl.maximum(lse, sink)
        both = top + tl.log2(tl.exp2(lse - top) + tl.exp2(sink - top))
        weight *= tl.exp2(lse - both)
        lse = both
    store_heads(out_ptr, acc * weight[:, None], index * C.DV, mask, C.DV, C.BLOCK_V)
    tl.store(lse_ptr + index, lse * LN2, mask=mask)


def tile_sizes(chip: Chip, dtype: str, D: int, each: int) -> dict[str, int]:
    """Tile sizes of the kernels of rows; dtype: "fp16", "bf16" or "fp32"."""
    if dtype == "fp32":
        rows = max(16, triton.next_power_of_2(each))
        return dict(BLOCK_M=rows, BLOCK_N=32 if D <= 128 else 16, num_warps=4, num_stages=1)
    # with operands in registers a tile of four warps spills
    warps = 4 if chip.is_amd or (chip.reads_shared and D <= 128) else 8
    return dict(BLOCK_M=64, BLOCK_N=64 if D <= 128 else 32, num_warps=warps, num_stages=2)


def constants(
    kernel: Any, operands: PackedOperands, softcap: float | None, tiles: dict[str, int]
) -> dict[str, Any]:
    """Constants, warps and stages that all kernels of the packed attention have."""
    (H, D), (K, DV) = operands.q.shape[1:], operands.v.shape[1:]
    dtype = DTYPES[operands.q.dtype]
    # the interpreter computes wrong bfloat16 products without an error: use float32 there
    wide = dtype == "bf16" and not isinstance(kernel, triton.JITFunction)
    of_tiles = Tiles(
        H=H,
        K=K,
        D=D,
        DV=DV,
        BLOCK_M=tiles["BLOCK_M"],
        BLOCK_N=tiles["BLOCK_N"],
        BLOCK_D=max(16, triton.next_power_of_2(D)),
        BLOCK_V=max(16, triton.next_power_of_2(DV)),
        PRECISION="ieee" if dtype == "fp32" else "tf32",
        CAP=softcap is not None,
    )
    return dict(
        ROWS=tiles["BLOCK_M"] // (H // K),
        DTYPE=tl.float32 if wide else getattr(tl, str(operands.q.dtype).removeprefix("torch.")),
        C=of_tiles,
        num_warps=tiles["num_warps"],
        num_stages=tiles["num_stages"],
    )


def scales(scale: float, softcap: float | None) -> dict[str, float]:
    """The factors of scores in base 2, as `tile_scores` takes them."""
    log2e = math.log2(math.e)
    return dict(scale=scale / softcap if softcap else scale * log2e, cap=(softcap or 0.0) * log2e)


def check_call(q: torch.Tensor, each: int, scale: float) -> None:
    """Raises ValueError for a dtype, a number of heads or a scale that kernels do not take."""
    # they take the maximum of scores before they scale it
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")
    if q.dtype not in DTYPES:
        raise ValueError(f"q must be float16, bfloat16 or float32, got {q.dtype}")
    if each > 64:
        raise ValueError(f"H must be at most 64 times K, got {each} times")


def packed_attention_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    end: torch.Tensor,
    position: torch.Tensor,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out and lse, as `packed_attention_ref`: one launch, and PyTorch's of the plan."""
    (R, H, D), (K, DV) = q.shape, v.shape[1:]
    check_call(q, H // K, scale)
    q, k, v = (x.contiguous() for x in (q, k, v))
    out = torch.empty(R, H, DV, dtype=q.dtype, device=q.device)
    lse = torch.empty(R, H, dtype=torch.float32, device=q.device)
    if R == 0:
        return out, lse
    tiles = tile_sizes(chip_of(q.device), DTYPES[q.dtype], max(D, DV), H // K)
    operands = PackedOperands(q, k, v)
    of_kernel = constants(packed_attention_kernel, operands, softcap, tiles)
    work = plan_packed(end, position, of_kernel["ROWS"], tiles["BLOCK_N"], window, chunk)
    packed_attention_kernel[(work.visits.shape[0], K)](
        operands=operands,
        layout=PackedLayout(end, position),
        work=work,
        sinks_ptr=sinks,
        out_ptr=out,
        lse_ptr=lse,
        R=R,
        B=work.visits.shape[1],
        **scales(scale, softcap),
        **of_kernel,
    )
    return out, lse
