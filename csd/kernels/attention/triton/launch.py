"""The two launches of the tree attention: partial results of the segments, then their merge."""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from csd.kernels.attention.layout import TreeLayout, Work
from csd.kernels.attention.triton.kernel import tree_attention_kernel
from csd.kernels.attention.triton.merge import merge_partials_triton
from csd.kernels.attention.triton.plan import plan_attention_triton, tile_rows
from csd.kernels.attention.triton.tile import Operands, Tiles
from csd.kernels.common.gpu import Chip, chip_of

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
# rows of the tiles of slots with few rows: the smallest tile of the tensor cores
SMALL = 16
# keys of a tile and stages of its loop: the first pair with which two programs fit a multiprocessor
KEY_TILES = ((64, 3), (64, 2), (32, 2))


class Partials(NamedTuple):
    """Scratch between the two launches; the layers of a step share it."""

    o: torch.Tensor  # [K, R, Dv] float32
    lse: torch.Tensor  # [K, R] float32


def empty_partials(M: int, H: int, K: int, D: int, programs: int, device: torch.device) -> Partials:
    """Allocates the partials of a pool of M rows, for `programs` programs per KV head."""
    R = (2 * M + programs * tile_rows(H, K)) * (H // K)
    return Partials(
        torch.empty(K, R, D, dtype=torch.float32, device=device),
        torch.empty(K, R, dtype=torch.float32, device=device),
    )


def _tiles(chip: Chip, dtype: str, D: int) -> dict[str, int]:
    """Tile sizes of the first launch; dtype: "fp16", "bf16" or "fp32"."""
    if dtype == "fp32":
        return dict(BLOCK_M=16, BLOCK_N=32 if D <= 128 else 16, num_warps=4, num_stages=1)
    if D > 128:
        # half a page per iteration: two stages of it fit into 64 KiB
        warps = 4 if chip.is_amd else 8
        return dict(BLOCK_M=64, BLOCK_N=32, num_warps=warps, num_stages=2)
    # on AMD one program fits
    fitting = (n for n in KEY_TILES if _shared(*n, D) <= chip.half)
    block_n, stages = KEY_TILES[1] if chip.is_amd else next(fitting, KEY_TILES[-1])
    return dict(BLOCK_M=64, BLOCK_N=block_n, num_warps=4, num_stages=stages)


def _shared(block_n: int, stages: int, D: int) -> int:
    """Bytes of 64 rows of queries and of `stages` blocks of keys and values, in 16 bits."""
    return 2 * D * (64 + 2 * stages * block_n)


def attention_arguments(
    kernel: Any, operands: Operands, softcap: float | None, scale: float
) -> tuple[dict[str, Any], dict[str, int]]:
    """Arguments that all kernels of the attention have, and the warps and stages of its tiles."""
    (H, D), (K, DV) = operands.q.shape[1:], operands.node_v.shape[1:]
    dtype = DTYPES[operands.q.dtype]
    tiles = dict(_tiles(chip_of(operands.q.device), dtype, max(D, DV)))
    # the interpreter computes wrong bfloat16 products without an error: use float32 there
    wide = dtype == "bf16" and not isinstance(kernel, triton.JITFunction)
    constants = Tiles(
        H=H,
        K=K,
        D=D,
        DV=DV,
        BLOCK_M=tiles.pop("BLOCK_M"),
        BLOCK_N=tiles.pop("BLOCK_N"),
        BLOCK_D=max(16, triton.next_power_of_2(D)),
        BLOCK_V=max(16, triton.next_power_of_2(DV)),
        PRECISION="ieee" if dtype == "fp32" else "tf32",
        CAP=softcap is not None,
        BLOCK_SMALL=SMALL,
    )
    arguments = dict(
        operands=operands,
        strides=operands.strides,
        scale=scale / softcap if softcap else scale * math.log2(math.e),
        cap=(softcap or 0.0) * math.log2(math.e),
        DTYPE=tl.float32 if wide else getattr(tl, str(operands.q.dtype).removeprefix("torch.")),
        C=constants,
    )
    return arguments, tiles


def tree_attention_triton(
    q: torch.Tensor,
    node_k: torch.Tensor,
    node_v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    layout: TreeLayout,
    scale: float,
    work: Work | None = None,
    out: torch.Tensor | None = None,
    partials: Partials | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns [M, H, Dv]. Two launches, and one or two more to make `work` if it is None."""
    (M, H, _), (K, DV), G = q.shape, node_v.shape[1:], layout.prompt_len.shape[0]
    if q.dtype not in DTYPES:
        raise ValueError(f"q must be float16, bfloat16 or float32, got {q.dtype}")
    out = torch.empty(M, H, DV, dtype=q.dtype, device=q.device) if out is None else out
    if M == 0:
        return out
    if work is None:
        work = plan_attention_triton(layout, heads=H, kv_heads=K, window=window, chunk=chunk)
    programs = work.program.shape[0]
    if partials is None:
        partials = empty_partials(M, H, K, DV, programs, q.device)
    operands = Operands(q, node_k, node_v, k_pages, v_pages)
    common, tiles = attention_arguments(tree_attention_kernel, operands, softcap, scale)
    if work.seen is not None:
        layout = layout._replace(ancestors=work.seen)
    tree_attention_kernel[(programs * K,)](
        layout=layout,
        work=work,
        partials=partials,
        G=G,
        prompt_width=layout.prompt_pages.stride(0),
        slot_width=layout.slot_pages.stride(0),
        partial_rows=partials.lse.shape[1],
        **common,
        **tiles,
    )
    return merge_partials_triton(
        partials.o, partials.lse, work.merge, tile_rows(H, K) * (H // K), out, sinks
    )
