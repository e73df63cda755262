"""Products in blocks of rows that agree bit for bit (`csd/models/row_blocks.py`)."""

from collections.abc import Callable

import torch

from csd.kernels.layers.gated_linear import gated_linear_triton
from csd.kernels.layers.row_linear import row_linear_triton, row_parts_triton
from csd.models.linear import in_loops, linear
from csd.models.row_blocks import (
    ANY_ROWS,
    Product,
    RowBlocks,
    fixed_blocks,
    in_blocks,
    row_blocks,
)

# rows of each block for cuBLAS
CUBLAS_ROWS = 64


class ExactProducts:
    """A product in blocks of rows that agree bit for bit, determined at the first use of a shape.

    rows: of every block; None determines them by trial.
    """

    gated: "ExactProducts | None" = None  # product of gate and up with their activation

    def __init__(self, product: Product = linear, rows: int | None = None):
        self.product = product
        self._own = product is row_linear_triton
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
    def for_kernels(cls, kernels: str, wanted: bool | str | None) -> "ExactProducts":
        """Products for the backend `kernels`; wanted: an engine's argument `exact`."""
        if wanted not in (None, True, False, "cublas"):
            raise ValueError(f"exact must be True, False or 'cublas', got {wanted!r}")
        if kernels == "triton":
            return cls.of("cublas" if wanted == "cublas" else "triton")
        if wanted == "cublas":
            raise ValueError(f"exact must be True or False with kernels={kernels!r}, got 'cublas'")
        return cls.of("library")

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: [M, in], weight: [out, in], bias: [out]. Returns [M, out]."""
        return in_blocks(self.product, self.learn(weight), x, weight, bias)

    @property
    def parts(self) -> "Callable | None":
        """Function for the product or splits that the next kernel adds up; None without splits."""
        return self._parts if self._own else None

    def _parts(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        blocks = self.learn(weight)
        if blocks.least <= x.shape[0] <= blocks.most:
            return row_parts_triton(x, weight, bias)
        return self(x, weight, bias)

    def learn(self, weight: torch.Tensor) -> RowBlocks:
        """Blocks for matrices of the shape, dtype and layout of `weight`, tried once and cached."""
        if in_loops(weight):
            return ANY_ROWS
        key = *weight.shape, weight.dtype, weight.layout, torch.get_num_threads()
        if key not in self.blocks:
            self.blocks[key] = (
                fixed_blocks(self.product, weight, self._rows)
                if self._rows
                else row_blocks(self.product, weight)
            )
        return self.blocks[key]
