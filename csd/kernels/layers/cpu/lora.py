"""LoRA terms of all layers' products (`csd/models/fused/lora.py`), for the loop over layers."""

from collections import namedtuple
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from numba.extending import overload

from csd.kernels.layers.cpu.linear import in_loops, multiply, numbers
from csd.kernels.numba.isa import instruction
from csd.kernels.numba.jit import loop
from csd.kernels.numba.tensors import LIKE, memory, read, readable, rounded
from csd.kernels.numba.threads import parts_for
from csd.kernels.numba.tiles import ISA

# addresses [L, 4, 2] of each layer's A and B by product; A's rows [L, 4], 0 for none; threads
# [4, 2]: number for the products with A and B; wide, inner, delta: addresses of
# buffers for x in the adapters' dtype, A x and B A x; like: array of it; isa: one of `tiles.ISA`
Lora = namedtuple("Lora", "addresses rows threads wide inner delta like isa")


def add_lora(
    lora: Lora | None, i: int, index: int, shape: Any, x: int, y: int, transposed: int, like: Any
) -> None:
    """Add B A x of x [M, K] to y [M, N], for product `index` of layer i. shape: M, N, K."""
    raise NotImplementedError("loops call it")


@overload(add_lora, strict=False)
def _add_lora(lora, i, index, shape, x, y, transposed, like):
    if isinstance(lora, types.NoneType):
        return lambda lora, i, index, shape, x, y, transposed, like: None
    kinds = dict(zip(lora.fields, lora.types, strict=True))
    same = kinds["like"].dtype == like.dtype

    def run(lora, i, index, shape, x, y, transposed, like):
        M, N, K = shape
        R = lora.rows[i, index]
        if R == 0:
            return
        source = x
        if not same:
            source = lora.wide
            _cast(M * K, x, source, like, lora.like)
        _multiply(lora, i, index, 0, (M, R, K), source, transposed, lora.inner)
        _multiply(lora, i, index, 1, (M, N, R), lora.inner, transposed, lora.delta)
        _add(M * N, lora.delta, y, lora.like, like)

    return run


@loop
def _multiply(lora, i, index, which, shape, x, transposed, y):
    multiply(
        lora.threads[index, which],
        shape,
        x,
        transposed,
        lora.addresses[i, index, which],
        0,
        y,
        lora.like,
        lora.isa,
    )


@loop
def _cast(count, x, y, like_x, like_y):
    """y = x, rounded to the dtype of `like_y`; x and y are addresses of `count` numbers."""
    source, to = memory(x, count, like_x), memory(y, count, like_y)
    for j in range(count):
        to[j] = rounded(read(source[j]), like_y)


@loop
def _add(count, x, y, like_x, like_y):
    """y += x, rounded to the dtype of `like_y`; x and y are addresses of `count` numbers."""
    source, to = memory(x, count, like_x), memory(y, count, like_y)
    for j in range(count):
        to[j] = rounded(read(to[j]) + read(source[j]), like_y)


def add(x: torch.Tensor, y: torch.Tensor) -> bool:
    """y += x in one pass, rounded to y's dtype; False, with no change, for unsuitable tensors."""
    whole = x.is_contiguous() and y.is_contiguous() and x.shape == y.shape
    if not (whole and readable(x) and readable(y)):
        return False
    _add(x.numel(), x.data_ptr(), y.data_ptr(), LIKE[x.dtype], LIKE[y.dtype])
    return True


class Stacks(NamedTuple):
    """A decoder's adapters as the loop reads them; only values change from step to step."""

    addresses: np.ndarray  # [L, 4, 2]
    rows: np.ndarray  # [L, 4]
    each: list[Any]  # for each product the stack of one layer, or None
    wide: int  # numbers in a row of the widest x
    most: int  # numbers in a row of the widest B A x
    dtype: torch.dtype | None  # None without adapters

    @classmethod
    def of(cls, decoder: Any, products: tuple[str, ...]) -> "Stacks | None":
        """Stacks of a decoder's adapters; None if the loop cannot run them."""
        lists = [layer.lora.get(name, []) for layer in decoder.layers for name in products]
        all_stacks = [stack for stacks in lists for stack in stacks]
        if not all_stacks:
            return cls(np.empty(0), np.empty(0), [], 0, 0, None)
        dtype = all_stacks[0].a.dtype
        matrices = [x for stack in all_stacks for x in stack]
        fit = all(x.dtype == dtype and x.dim() == 3 and in_loops(x) for x in matrices)
        if not fit or max(map(len, lists)) > 1:
            return None
        addresses = [[x.data_ptr() for x in s[0]] if s else [0, 0] for s in lists]
        rows = [s[0].ranks if s else 0 for s in lists]
        each = [
            next((s[0] for s in lists[i :: len(products)] if s), None) for i in range(len(products))
        ]
        # shapes are those of `linear.by_columns`
        wide = max(stack.a.shape[1] for stack in all_stacks)
        widest = max(stack.b.shape[0] * stack.b.shape[2] for stack in all_stacks)
        held = np.array(addresses).reshape(-1, len(products), 2)
        return cls(held, np.array(rows).reshape(held.shape[:2]), each, wide, widest, dtype)

    def for_rows(self, M: int) -> tuple[Lora | None, list[torch.Tensor]]:
        """The loop's argument for M rows, None without adapters, and the buffers it points to."""
        if self.dtype is None:
            return None, []
        widths = self.wide, int(self.rows.max()), self.most
        buffers = [torch.empty(M * wide, dtype=self.dtype) for wide in widths]
        counts = [
            [parts_for(numbers(x, M)) for x in stack] if stack else [1, 1] for stack in self.each
        ]
        places, isa = [x.data_ptr() for x in buffers], ISA[instruction(self.dtype)]
        lora = Lora(self.addresses, self.rows, np.array(counts), *places, LIKE[self.dtype], isa)
        return lora, buffers
