"""Matrix products whose result for a row does not depend on the number of rows.

A CPU's library selects its kernel by the number of rows, and kernels add in different orders. The
range in which its results agree bit for bit depends on the machine, and is determined here by trial
for each shape of a model's weights: any number of rows from `min_rows` to `max_rows` gives a row
the same bits. Fewer rows are padded, more are multiplied in blocks.

Measured ranges of oneDNN: in bfloat16 all of 2 to 256 with AVX512-BF16, as few as 32 with AMX; in
float32 all but 1. csd's own loop (`csd/kernels/layers/cpu/linear.py`) agrees for every number of
rows, by its order of summation, and nothing is tried for weights that are packed for it.

Triton's product (`csd/kernels/layers/row_linear.py`) is written to agree for every number of rows,
and is tried like the others: no manual states whether an instruction for more columns adds in the
same order. cuBLAS selects among many kernels, so it always multiplies CUBLAS_ROWS rows at once.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from csd.kernels.layers.gated_linear import gated_linear_triton
from csd.kernels.layers.row_linear import row_linear_triton, row_parts_triton
from csd.kernels.ops import Ops
from csd.models.fused.linear import in_loops, linear, packed

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
Trial = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# numbers of rows that are tried; fewer for matrices with more than LARGE numbers
SIZES = (1, 2, 3, 4, 5, 8, 13, 16, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 192, 256)
FEW_SIZES = (1, 2, 3, 8, 16, 31, 32, 33, 64)
LARGE = 1 << 24
# numbers of rows with which one thread is compared with several
THREAD_SIZES = (1, 2, 8, 16, 33, 64)
LEAST = (1, 2, 4, 8, 16, 32)
# numbers of rows for Triton's product, on both sides of each of its tile sizes
GPU_SIZES = (1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129, 256, 512)
# csd's own products on a GPU
TRITON = (row_linear_triton, gated_linear_triton)


class RowBlocks(NamedTuple):
    """Smallest and largest number of rows between which a row's result has the same bits."""

    min_rows: int
    max_rows: int


# for csd's own loop on a CPU, which computes each row separately
ANY_ROWS = RowBlocks(1, sys.maxsize)


def in_blocks(
    product: Product,
    blocks: RowBlocks,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    rows = x.shape[0]
    if blocks.min_rows <= rows <= blocks.max_rows or rows == 0:
        return product(x, weight, bias)
    if rows < blocks.min_rows:
        return product(F.pad(x, (0, 0, 0, blocks.min_rows - rows)), weight, bias)[:rows]
    parts = (in_blocks(product, blocks, part, weight, bias) for part in x.split(blocks.max_rows))
    return torch.cat(list(parts))


def row_blocks(product: Product, weight: torch.Tensor) -> RowBlocks:
    """Largest blocks of rows whose results agree bit for bit in trials; ValueError if none do."""
    sizes: tuple[int, ...] = SIZES
    if product in TRITON:
        sizes = GPU_SIZES
    elif weight.shape[0] * weight.shape[1] > LARGE:
        sizes = FEW_SIZES
    x, weight, _ = trial = _trial(sizes[-1], weight)
    interpreted = product in TRITON and weight.device.type == "cpu"
    results = {n: _in_pieces(product, x[:n] if interpreted else x, weight, n) for n in sizes}
    # blocks of fewer than 16 rows would multiply the time of a step
    for size in (n for n in reversed(sizes) if n >= 16):
        for least in (n for n in LEAST if n <= size):
            tried = [n for n in sizes if least <= n <= size]
            rows = {n: min(len(results[n]), len(results[size])) for n in tried}
            same = all(torch.equal(results[n][:m], results[size][:m]) for n, m in rows.items())
            if same and _any_place(product, size, trial):
                return RowBlocks(least, size)
    raise _nothing_agrees(weight)


def fixed_blocks(product: Product, weight: torch.Tensor, rows: int) -> RowBlocks:
    """Blocks of exactly `rows` rows. Raises ValueError unless a row's index changes no bits."""
    if not _any_place(product, rows, _trial(rows, weight)):
        raise _nothing_agrees(weight)
    return RowBlocks(rows, rows)


def _trial(rows: int, weight: torch.Tensor) -> Trial:
    """Rows [rows, in], a matrix like `weight` to multiply them with, and a permutation of them.

    Results that are rounded to 16 bits rarely show another order of summation. So the matrix has
    pairs of equal columns, and in three of four rows two large terms cancel: terms that are added
    between the two lose their low bits, and which bits depends on the order.
    """
    generator = torch.Generator().manual_seed(0)
    K = weight.shape[1]
    x = torch.randn(rows, K, generator=generator)
    order = torch.randperm(rows, generator=generator)
    columns = torch.randperm(K, generator=generator)[: min(6, K // 2 * 2)].view(-1, 2)
    large = min(2.0**20, torch.finfo(weight.dtype).max / 2)
    packs = weight.layout != torch.strided
    trial = weight.to_dense() if packs else weight.clone()
    for i, (plus, minus) in enumerate(columns.tolist()):
        trial[:, minus] = trial[:, plus]
        x[i::4, plus], x[i::4, minus] = large, -large
    rows_of = x.to(weight.device, weight.dtype)
    return rows_of, packed(trial) if packs else trial, order.to(weight.device)


def _nothing_agrees(weight: torch.Tensor) -> ValueError:
    return ValueError(
        "exact must be False here: on this machine, the bits of a row's product with a "
        f"{tuple(weight.shape)} {weight.dtype} matrix depend on the number of rows"
    )


def _in_pieces(product: Product, x: torch.Tensor, weight: torch.Tensor, n: int) -> torch.Tensor:
    """Results of x's rows, n at a time; a last piece of fewer rows is left out."""
    return torch.cat([product(piece, weight, None) for piece in x.split(n) if len(piece) == n])


def _any_place(product: Product, n: int, trial: Trial) -> bool:
    """True if the first n rows have the same results in another order."""
    x, weight, order = trial
    moved = order[order < n]
    return torch.equal(product(x[:n][moved], weight, None), product(x[:n], weight, None)[moved])


# rows of each block for cuBLAS
CUBLAS_ROWS = 64


class ExactProducts:
    """A product in blocks of rows that agree bit for bit, determined at the first use of a shape.

    rows: of every block; None determines them by trial.
    """

    gated: "ExactProducts | None" = None  # product of gate and up with their activation

    def __init__(self, product: Product = linear, rows: int | None = None):
        self.product = product
        self._rows = rows
        self.blocks: dict[tuple, RowBlocks] = {}

    @classmethod
    def of(cls, kind: str) -> "ExactProducts":
        """Products by kind: "library" (the CPU's), "triton" or "cublas"."""
        if kind == "library":
            return cls()
        if kind not in ("triton", "cublas"):
            raise ValueError(f"kind must be 'library', 'triton' or 'cublas', got {kind!r}")
        if kind == "cublas":
            return cls(linear, CUBLAS_ROWS)
        made = cls(row_linear_triton)
        made.gated = cls(gated_linear_triton)
        return made

    @classmethod
    def beside(cls, ops: Ops, wanted: bool | str | None) -> "ExactProducts":
        """Products for an engine with these operations; wanted: its argument `exact`."""
        if wanted not in (None, True, False, "cublas", "portable"):
            raise ValueError(f"exact must be True, False, 'cublas' or 'portable', got {wanted!r}")
        if ops.launches:
            return cls.of("cublas" if wanted == "cublas" else "triton")
        if wanted == "cublas":
            raise ValueError(f"exact must be True or False with kernels={ops.name!r}, got 'cublas'")
        return cls.of("library")

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: [M, in], weight: [out, in], bias: [out]. Returns [M, out]."""
        return in_blocks(self.product, self.learn(weight), x, weight, bias)

    @property
    def parts(self) -> "Callable | None":
        """Function for the product or splits that the next kernel adds up; None without splits."""
        return self._parts if self.product is row_linear_triton else None

    def _parts(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        blocks = self.learn(weight)
        if blocks.min_rows <= x.shape[0] <= blocks.max_rows:
            return row_parts_triton(x, weight, bias)
        return self(x, weight, bias)

    def _in_loops(self, weight: torch.Tensor) -> bool:
        return self.product is linear and in_loops(weight)

    def threads_agree(self, weights: list[torch.Tensor], threads: int) -> bool:
        """True if one thread and `threads` give products the same bits, by trial of each shape."""
        before = torch.get_num_threads()
        kinds = {(w.shape, w.dtype, w.layout): w for w in weights if not self._in_loops(w)}
        try:
            for weight in kinds.values():
                x, trial, _ = _trial(THREAD_SIZES[-1], weight)
                results = []
                for count in (1, threads):
                    torch.set_num_threads(count)
                    results.append([self(x[:rows], trial) for rows in THREAD_SIZES])
                if not all(map(torch.equal, *results)):
                    return False
        finally:
            torch.set_num_threads(before)
        return True

    def learn(self, weight: torch.Tensor) -> RowBlocks:
        """Blocks for matrices of the shape, dtype and layout of `weight`, tried once and cached."""
        if self._in_loops(weight):
            return ANY_ROWS
        key = *weight.shape, weight.dtype, weight.layout, torch.get_num_threads()
        if key not in self.blocks:
            search = partial(fixed_blocks, rows=self._rows) if self._rows else row_blocks
            self.blocks[key] = search(self.product, weight)
        return self.blocks[key]
