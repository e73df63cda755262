"""Matrix products whose result for a row does not depend on how many rows there are.

A CPU's library picks its kernel by the number of rows, and other kernels add in other orders. How
far its results agree differs from machine to machine and is found out here, for each shape of a
model's weights: a number of rows that is `least` or more and `most` or fewer gives a row the same
bits. Fewer rows are padded, more are multiplied in blocks.

Seen so far of oneDNN: in bfloat16 all of 2 to 256 with AVX512-BF16, as few as 32 with AMX; in
float32 all but 1. csd's own loop (`csd/cpu/products.py`) has this for every number of rows,
by how it adds, and nothing is tried where weights are packed for it.

Triton's product (`csd.kernels.row_linear`) is made to agree for every number of rows, and is tried
like the others: whether an instruction for more columns adds in the same order, no manual says.
cuBLAS picks among many kernels, so its rows are always multiplied CUBLAS_ROWS at once.
"""

import copy
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from csd.kernels.gated_linear import gated_linear_triton
from csd.kernels.row_linear import row_linear_triton, row_parts_triton
from csd.kernels.tree_attention.batched_check import check_products
from csd.models.decoder import Decoder, DecoderLike
from csd.models.linear import in_loops, linear, packed
from csd.models.load import Loaded

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

# numbers of rows that are tried, and of matrices that are too large for all of them
SIZES = (1, 2, 3, 4, 5, 8, 13, 16, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 192, 256)
FEW_SIZES = (1, 2, 3, 8, 16, 31, 32, 33, 64)
LARGE = 1 << 24
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEAST = (1, 2, 4, 8, 16, 32)
HALVES = (torch.bfloat16, torch.float16)
# blocks of so many rows, and of two at least, take no time that can be measured
FREE_ROWS = 32
# of Triton's product, on both sides of each of its tiles
GPU_SIZES = (1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129, 256, 512)
# on a GPU, the products that are ours; rows of cuBLAS's blocks
TRITON = (row_linear_triton, gated_linear_triton)
CUBLAS_ROWS = 64


class RowBlocks(NamedTuple):
    """Numbers of rows among which a row's result has the same bits."""

    least: int
    most: int


# of csd's own loop on a CPU, which adds up each row by itself
ANY_ROWS = RowBlocks(1, sys.maxsize)


def exact(decoder: Decoder, products: "ExactProducts | None" = None) -> Decoder:
    """`decoder` over the same weights, with products that do not depend on the number of rows.

    products: of an earlier call, with the row blocks found for its shapes.

    Raises ValueError where no number of rows is found that gives a row the same bits at every
    place in it.
    """
    made = copy.copy(decoder)
    made.linear = products = products or ExactProducts()
    made.gated, made.parts = products.gated, products.parts
    for weight in _weights(decoder):
        products.learn(weight)
    if products.gated:
        for layer in decoder.layers:
            if layer.gate_up is not None:
                products.gated.learn(layer.gate_up)
    return made


def choose_exact(
    wanted: bool | str | None, loaded: Loaded, kernels: str, products: "ExactProducts"
) -> tuple[DecoderLike, bool]:
    """The decoder that an engine runs, and whether it is exact. wanted: None takes what is free.

    Raises as `exact_decoder` where `wanted` is true.
    """
    # a library takes for two rows the time of one in 16 bits, and not in float32
    free = loaded.dtype in HALVES or _any_rows(loaded.decoder)
    if wanted is False or (wanted is None and not free):
        return loaded.decoder, False
    if wanted:
        return exact_decoder(loaded, products), True
    if kernels == "triton":
        return loaded.decoder, False
    try:
        made = exact_decoder(loaded, products)
    except ValueError:
        return loaded.decoder, False
    free = all(b.least <= 2 and b.most >= FREE_ROWS for b in products.blocks.values())
    return (made, True) if free else (loaded.decoder, False)


def exact_decoder(loaded: Loaded, products: "ExactProducts") -> Decoder:
    """The loaded decoder by `exact`.

    Raises ValueError for what `exact` does not serve and on a machine where nothing is exact.
    """
    if products.on_cpu and loaded.device.type != "cpu":
        where = loaded.device.type
        raise ValueError(f"exact must be False with kernels='reference' on {where}, got True")
    if loaded.dtype not in DTYPES:
        raise ValueError(f"exact must be False in {loaded.dtype}, got True")
    if not isinstance(loaded.decoder, Decoder):
        made = type(loaded.decoder).__name__
        raise ValueError(f"exact needs csd's fused decoder (a csd Decoder), got a {made}")
    if loaded.decoder.config.experts and loaded.device.type != "cpu":
        raise ValueError("exact must be False for a model of experts on a GPU, got True")
    if products.on_cpu:
        check_products(loaded.config.head_dim)
    return exact(loaded.decoder, products)


def _weights(decoder: Decoder) -> list[torch.Tensor]:
    layers = [w for x in decoder.layers for w in (x.qkv, x.out, x.gate_up, x.down)]
    experts = [x.experts for x in decoder.layers if x.experts is not None]
    # all of a layer's have one shape
    chosen = [w for x in experts for w in (x.router, x.gate_up[0], x.down[0])]
    stacks = [w for x in decoder.layers for found in x.lora.values() for s in found for w in s]
    head = [decoder.head, *(w for stack in decoder.head_lora for w in stack)]
    return [w for w in (*layers, *chosen, *stacks, *head) if w is not None]


def _any_rows(decoder: DecoderLike) -> bool:
    return isinstance(decoder, Decoder) and all(map(in_loops, _weights(decoder)))


class ExactProducts:
    """A product in blocks of rows that agree; finds them for a shape that is new to it.

    rows: of every block, where it is not to be found out.
    """

    on_cpu = True  # whether attention on a CPU goes with it
    gated: "ExactProducts | None" = None  # of gate and up, through their activation

    def __init__(self, product: Product = linear, rows: int | None = None):
        self.product = product
        self._own = product is row_linear_triton
        self._rows = rows
        self.blocks: dict[tuple, RowBlocks] = {}

    @classmethod
    def of(cls, kind: str) -> "ExactProducts":
        """kind: "library", that of the CPU, "triton", or "cublas"."""
        if kind == "library":
            return cls()
        if kind not in ("triton", "cublas"):
            raise ValueError(f"kind must be 'library', 'triton' or 'cublas', got {kind!r}")
        made = cls(row_linear_triton) if kind == "triton" else cls(linear, CUBLAS_ROWS)
        made.on_cpu = False
        if kind == "triton":
            made.gated = cls(gated_linear_triton)
        return made

    @classmethod
    def for_kernels(cls, kernels: str, wanted: bool | str | None) -> "ExactProducts":
        """Those that go with `kernels`; wanted: an engine's argument `exact`."""
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
        """The product, or its splits, which what follows adds up; None has no splits."""
        return self._parts if self._own else None

    def _parts(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        blocks = self.learn(weight)
        if blocks.least <= x.shape[0] <= blocks.most:
            return row_parts_triton(x, weight, bias)
        return self(x, weight, bias)

    def learn(self, weight: torch.Tensor) -> RowBlocks:
        """The blocks of products with a matrix such as `weight`."""
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


def in_blocks(
    product: Product,
    blocks: RowBlocks,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    rows = x.shape[0]
    if blocks.least <= rows <= blocks.most or rows == 0:
        return product(x, weight, bias)
    if rows < blocks.least:
        return product(F.pad(x, (0, 0, 0, blocks.least - rows)), weight, bias)[:rows]
    parts = (in_blocks(product, blocks, part, weight, bias) for part in x.split(blocks.most))
    return torch.cat(list(parts))


def row_blocks(product: Product, weight: torch.Tensor) -> RowBlocks:
    """The largest blocks of rows whose results agree bit for bit, as tried."""
    sizes: tuple[int, ...] = SIZES
    if product in TRITON:
        sizes = GPU_SIZES
    elif weight.shape[0] * weight.shape[1] > LARGE:
        sizes = FEW_SIZES
    x, weight, order = _trial(sizes[-1], weight)
    interpreted = product in TRITON and weight.device.type == "cpu"
    found = {n: _in_pieces(product, x[:n] if interpreted else x, weight, n) for n in sizes}
    for most in reversed(sizes):
        for least in LEAST:
            tried = [n for n in sizes if least <= n <= most]
            # blocks of less than 16 rows would multiply the time of a step
            if not tried or most < 16 or tried[-1] != most:
                continue
            blocks = RowBlocks(least, most)
            same = all(_same(found[n], found[most]) for n in tried)
            if same and _any_place(product, blocks, x, weight, order):
                return blocks
    raise _nothing_agrees(weight)


def fixed_blocks(product: Product, weight: torch.Tensor, rows: int) -> RowBlocks:
    """Blocks of just so many rows; their results must agree at every place."""
    blocks = RowBlocks(rows, rows)
    x, tried, order = _trial(rows, weight)
    if not _any_place(product, blocks, x, tried, order):
        raise _nothing_agrees(weight)
    return blocks


def _trial(rows: int, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [rows, in], a matrix such as `weight` to multiply them with, and an order of them.

    Results that are rounded to 16 bits rarely show another order of summation. So in three rows of
    four two large terms cancel, because the matrix has pairs of equal columns: what else was added
    between the two has lost its low bits, which differ by the order.
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
        f"exact must be False here: products with a {tuple(weight.shape)} {weight.dtype} matrix "
        "give a row other bits for every number of rows on this machine"
    )


def _in_pieces(product: Product, x: torch.Tensor, weight: torch.Tensor, n: int) -> torch.Tensor:
    """Results of x's rows, n at a time; a last piece of fewer is left out."""
    return torch.cat([product(piece, weight, None) for piece in x.split(n) if len(piece) == n])


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    n = min(a.shape[0], b.shape[0])
    return torch.equal(a[:n], b[:n])


def _any_place(
    product: Product,
    blocks: RowBlocks,
    x: torch.Tensor,
    weight: torch.Tensor,
    order: torch.Tensor,
) -> bool:
    """Whether rows in another order have the same results."""
    n = blocks.most
    moved = order[order < n]
    return torch.equal(product(x[:n][moved], weight, None), product(x[:n], weight, None)[moved])
