"""LoRA of the package peft, added to the fused products of a decoder.

    y = W x + b;   for each active adapter: y = y + s B (A x), with x in A's dtype;   y in W's dtype

in the order of casts of `peft.tuners.lora.layer.Linear`. A fused product has several parts, such as
queries, keys and values. The A of one adapter are stacked, and its B, multiplied by s, form a block
diagonal: two small products, however many parts there are. Both are copies. They are updated in
place when a call begins, and when a step detects a changed weight or scale, so graphs find them at
the same address, and the user's parameters stay as they are.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from csd.models.fused.linear import add_rounded, packed
from csd.models.lora import GONE, base_linear, is_lora, settle, state_of, working
from csd.utils.torch_state import version_of

# ranks of a stack are padded to a multiple of this, as products in loops and tiles need
RANKS = 32


class Stack(NamedTuple):
    """Adapters of one fused product, with R ranks in all."""

    a: torch.Tensor  # [R, in], or `packed`
    b: torch.Tensor  # [out, R], or `packed`

    @property
    def ranks(self) -> int:
        return self.a.shape[-2] if self.a.dim() == 2 else self.a.shape[0] * self.a.shape[2]


def add_lora(
    product: Callable, x: torch.Tensor, y: torch.Tensor, stacks: list[Stack]
) -> torch.Tensor:
    """Add the adapters' results for x [M, in] to the base's result y [M, out].

    y may be written. Returns the sum [M, out] in y's dtype.
    """
    total = y
    for i, stack in enumerate(stacks, 1):
        x = x.to(stack.a.dtype)
        added = product(product(x, stack.a, None), stack.b, None)
        total = add_rounded(total, added, y.dtype) if i == len(stacks) else total + added
    return total


def key_of(products: list[list[Any]]) -> tuple:
    """Key that is equal for adapters whose stacks have equal shapes and dtypes.

    products: for each fused product, the modules that make it up.
    """
    return tuple(
        tuple(
            (i, layer.lora_A[name].weight.shape[0], layer.lora_A[name].weight.dtype)
            for i, layer in enumerate(parts)
            if is_lora(layer)
            for name in working(layer)
        )
        for parts in products
    )


@dataclass(slots=True)
class _Copy:
    """Plain matrices of a stack, and views of them for the adapters' matrices."""

    a: torch.Tensor  # [R, in]
    b: torch.Tensor  # [out, R]
    stack: Stack
    number: int  # index of the adapter among a layer's working ones
    # layer, views of a and b, and their places: (ranks, rows of b)
    pieces: list[tuple[Any, torch.Tensor, torch.Tensor, tuple[slice, slice]]]


class FusedAdapters:
    """The stacks of a decoder's fused products, kept up to date with peft's parameters.

    products: for each fused product, the modules that make it up, each a LoRA or a plain Linear.

    Raises TypeError if parts of a product have adapters of more than one dtype.
    """

    def __init__(self, products: list[list[Any]]):
        self.products = products
        self.key = key_of(products)
        self.stacks: list[list[Stack]] = []
        self._copies: list[_Copy] = []
        # tensors that later calls reuse must not be made in one caller's inference mode
        with torch.inference_mode(False):
            for parts in products:
                made = list(_copies(parts))
                self._copies += made
                self.stacks.append([copy.stack for copy in made])
        self._layers = [layer for parts in products for layer in parts if is_lora(layer)]
        self.begin_call()

    def begin_call(self) -> None:
        """Read the adapters that are active now; the whole call uses them."""
        settle(self._layers)
        self.state = self.now()
        # per copy: layers, names of their adapters, and the pieces' views and places
        self._used = [
            [(layer, working(layer)[copy.number], *piece) for layer, *piece in copy.pieces]
            for copy in self._copies
        ]
        self._read()

    def now(self) -> tuple:
        """State of the adapters that are active now; a call that has begun keeps its own."""
        return state_of(self._layers)

    def follow(self) -> None:
        """Read the call's adapters if weights or scales changed, even if others are active now.

        Raises RuntimeError if they were merged or removed.
        """
        now = self.now()
        if now != self.state:
            # others may be active; a merge changes the base weights
            merged = any(a[2] != b[2] for a, b in zip(now, self.state, strict=True))
            there = (name in layer.lora_A for used in self._used for layer, name, *_ in used)
            if merged or not all(there):
                raise RuntimeError(GONE)
        if self._seen != self._versions():
            self._read()

    def pieces(self) -> Iterator[tuple[Stack, torch.Tensor, torch.Tensor, list[tuple]]]:
        """Yield each stack, its plain A and B, and the parameters that it consists of.

        Of each parameter pair: A, B, (their ranks in the stack, B's rows), and their scale.
        """
        for copy, used in zip(self._copies, self._used, strict=True):
            parameters = [
                (layer.lora_A[name].weight, layer.lora_B[name].weight, at, layer.scaling[name])
                for layer, name, _, _, at in used
            ]
            yield copy.stack, copy.a, copy.b, parameters

    def _versions(self) -> list:
        return [*map(version_of, self._weights), *(d[name] for d, name in self._scales)]

    @torch.no_grad()
    def _read(self) -> None:
        pieces = [piece for used in self._used for piece in used]
        a = [layer.lora_A[name].weight for layer, name, *_ in pieces]
        b = [layer.lora_B[name].weight for layer, name, *_ in pieces]
        self._weights = [*a, *b]
        self._scales = [(layer.scaling, name) for layer, name, *_ in pieces]
        self._seen = self._versions()
        if not a:
            return
        to_a, to_b = zip(*(views for _, _, *views, _ in pieces), strict=True)
        torch._foreach_copy_(to_a, [w.data for w in a])
        torch._foreach_copy_(to_b, [w.data for w in b])
        torch._foreach_mul_(to_b, [float(d[name]) for d, name in self._scales])
        for copy in self._copies:
            for plain, laid in zip((copy.a, copy.b), copy.stack, strict=True):
                if laid is not plain:
                    laid.copy_(packed(plain))


def _copies(parts: list[Any]) -> Iterator[_Copy]:
    names = [working(part) if is_lora(part) else [] for part in parts]
    rows = [base_linear(part).weight.shape[0] for part in parts]
    starts = [sum(rows[:i]) for i in range(len(rows))]
    for number in range(max(map(len, names), default=0)):
        copied = [
            (p, n[number], start)
            for p, n, start in zip(parts, names, starts, strict=True)
            if number < len(n)
        ]
        weights = [(p.lora_A[n].weight, p.lora_B[n].weight) for p, n, _ in copied]
        if len({w.dtype for pair in weights for w in pair}) > 1:
            raise TypeError(
                "the adapters of a layer's projections have different dtypes, which csd's fused "
                "decoder does not support"
            )
        ranks = [a.shape[0] for a, _ in weights]
        R, like = -(-sum(ranks) // RANKS) * RANKS, weights[0][0].data
        a, b = like.new_zeros(R, like.shape[1]), like.new_zeros(sum(rows), R)
        pieces, offset = [], 0
        for (part, _, start), rank in zip(copied, ranks, strict=True):
            wide = base_linear(part).weight.shape[0]
            own, out = slice(offset, offset + rank), slice(start, start + wide)
            pieces.append((part, a[own], b[out, own], (own, out)))
            offset += rank
        yield _Copy(a, b, Stack(packed(a), packed(b)), number, pieces)
