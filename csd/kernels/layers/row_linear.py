"""Product with a weight matrix whose result for a row has the same bits for any number of rows.

    y[m, n] = sum over s of (sum over k of split s of x[m, k] w[n, k]) + b[n]

K is cut into splits, and a split into blocks, at places that depend only on N, K and the dtype. A
block's products are added to the split's sum by one kind of matrix instruction, block after block,
and the splits' sums are added in order. The weights are the instruction's rows (its M, always in
tiles of BLOCK_N), the rows of x its columns: M changes only the number of columns of a tile.

One launch, and one more if K is split. (Thinking Machines, "Defeating nondeterminism in LLM
inference", 2025, has the argument for fixed tiles and fixed splits.)
"""

from typing import Any

import torch

from csd.kernels.common.gpu import Chip, chip_of, dependent_options
from csd.kernels.common.operator import operator
from csd.state.record import check_tensor

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
# K is split until there are this many programs, in splits of LEAST_K numbers or more
PROGRAMS, LEAST_K, MAX_SPLITS = 128, 512, 8
# outputs and numbers of K in a tile; fewer for float32, which is multiplied without tensor cores
TILE, NARROW_TILE = (128, 64), (64, 32)
ROW_TILES = (16, 32, 64, 128)
SUM_BLOCK = 1024


def splits_of(N: int, K: int, dtype: torch.dtype) -> tuple[int, int]:
    """Number of splits of K and blocks per split, which depend only on N, K and the dtype.

    The last split may have fewer blocks.
    """
    block_n, block_k = NARROW_TILE if dtype == torch.float32 else TILE
    tiles, blocks, splits = -(-N // block_n), -(-K // block_k), 1
    while splits < MAX_SPLITS and tiles * splits < PROGRAMS and 2 * splits * LEAST_K <= K:
        splits *= 2
    each = -(-blocks // splits)
    return -(-blocks // each), each


def row_linear_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Plain PyTorch: adds the splits' sums in order. x: [M, K], weight: [N, K], bias: [N]."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    (N, K), block_k = weight.shape, (NARROW_TILE if x.dtype == torch.float32 else TILE)[1]
    width = splits_of(N, K, x.dtype)[1] * block_k
    pairs = zip(x.to(dtype).split(width, 1), weight.to(dtype).split(width, 1), strict=True)
    y = sum(a @ b.T for a, b in pairs)
    return (y if bias is None else y + bias.to(dtype)).to(x.dtype)


def row_tile(M: int, dtype: torch.dtype) -> int:
    """Number of rows of x in a tile, for x with M rows."""
    sizes = ROW_TILES[:-1] if dtype == torch.float32 else ROW_TILES
    return next((n for n in sizes if n >= M), sizes[-1])


def _stages(chip: Chip, dtype: torch.dtype, rows: int) -> int:
    if dtype == torch.float32 or chip.is_amd:
        return 2
    # a stage is 24 KiB at 64 rows, and 32 KiB at 128
    copies = chip.half // (2 * TILE[1] * (TILE[0] + rows))
    return max(2, min(4, copies + (not chip.reads_shared)))


def product_tiles(x: torch.Tensor, K: int, kernel: Any) -> dict[str, Any]:
    """Constants and launch options of a kernel that multiplies x [M, K]."""

    import triton
    import triton.language as tl

    narrow = x.dtype == torch.float32
    block_n, block_k = NARROW_TILE if narrow else TILE
    # the interpreter computes wrong bfloat16 products without an error: use float32 there
    wide = x.dtype == torch.bfloat16 and not isinstance(kernel, triton.JITFunction)
    block_t = row_tile(x.shape[0], x.dtype)
    return dict(
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCK_T=block_t,
        EVEN=K % block_k == 0,
        DTYPE=tl.float32 if wide else getattr(tl, str(x.dtype).removeprefix("torch.")),
        PRECISION="ieee" if narrow else "tf32",
        num_warps=4,
        num_stages=_stages(chip_of(x.device), x.dtype, block_t),
    )


def row_linear_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """One launch, or two if `splits_of` splits K. weight, bias and x's rows: contiguous."""

    import triton

    from csd.kernels.layers.triton.linear import add_splits_kernel

    target = row_parts_triton(x, weight, bias)
    if target.dim() == 2:
        return target
    splits, M, N = target.shape
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    add_splits_kernel[(M, triton.cdiv(N, SUM_BLOCK))](
        part_ptr=target,
        bias_ptr=bias,
        y_ptr=y,
        M=M,
        N=N,
        PARTS=splits,
        BLOCK=SUM_BLOCK,
        num_warps=4,
    )
    return y


def row_parts_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """One launch: returns the result [M, N], or if K is split its sums [splits, M, N] float32.

    Adding the sums in order and rounding gives the result of `row_linear_triton` without the bias.
    """

    import triton

    from csd.kernels.layers.triton.linear import row_linear_kernel

    if x.dtype not in DTYPES:
        raise ValueError(f"x must be float16, bfloat16 or float32, got {x.dtype}")
    M, (N, K) = x.shape[0], weight.shape
    splits, blocks = splits_of(N, K, x.dtype)
    shape, dtype = ((splits, M, N), torch.float32) if splits > 1 and M else ((M, N), x.dtype)
    target = torch.empty(shape, dtype=dtype, device=x.device)
    if M == 0:
        return target
    tiles = product_tiles(x, K, row_linear_kernel)
    grid = triton.cdiv(M, tiles["BLOCK_T"]), triton.cdiv(N, tiles["BLOCK_N"]), splits
    row_linear_kernel[grid](
        x_ptr=x,
        weights=(weight, bias if splits == 1 else None),
        y_ptr=target,
        M=M,
        N=N,
        K=K,
        x_stride=x.stride(0),
        blocks=blocks,
        AHEAD=tiles["num_stages"] - 1,
        **tiles,
        **dependent_options(row_linear_kernel),
    )
    return target


_row_linear = operator(
    "row_linear",
    row_linear_ref,
    row_linear_triton,
    fake=lambda x, weight, bias=None: x.new_empty(x.shape[0], weight.shape[0]),
)


def row_linear(
    x: torch.Tensor,  # [M, K], rows contiguous
    weight: torch.Tensor,  # [N, K]
    bias: torch.Tensor | None = None,  # [N]
) -> torch.Tensor:
    """Returns x weight^T + bias [M, N]; all of one dtype: float16, bfloat16 or float32."""
    check_product(x, weight, bias)
    return _row_linear(x, weight, bias)


def check_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raises ValueError for operands that `row_linear` does not support."""
    if x.dim() != 2 or weight.dim() != 2:
        raise ValueError(
            f"x and weight must be [M, K] and [N, K], got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be float16, bfloat16 or float32, got {x.dtype}")
    check_tensor("x", x, (None, weight.shape[1]), x.dtype, x.device, rows_apart=True)
    check_tensor("weight", weight, weight.shape, x.dtype, x.device)
    if bias is not None:
        check_tensor("bias", bias, (weight.shape[0],), x.dtype, x.device)
