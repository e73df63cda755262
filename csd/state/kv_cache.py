"""Keys and values in pages of 64 tokens: prompts once per group, committed tokens per slot."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from csd.state.prefix_cache import PageAllocator, PrefixIndex
from csd.state.recurrent import StateCache
from csd.utils.device import upload

PAGE = 64


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


def pages_held(pages: int, reach: int | None, ahead: int = 0) -> int:
    """Number R of a text's pages in memory at once if no row attends to more than `reach` keys.

    Page i has the memory of page i - R: a token overwrites the one that is 64 R before it. A row
    attends to itself and to the reach - 1 tokens before it; ahead: tokens that are written before
    the first of them attends.
    """
    return pages if reach is None else min(pages, max(1, pages_for(reach - 1 + ahead)))


def in_turn(pages: list[int], tokens: int) -> list[int]:
    """Page table of `tokens` tokens that repeats these pages cyclically."""
    return [pages[i % len(pages)] for i in range(pages_for(tokens))]


class LayerShape(NamedTuple):
    """Sizes of a layer's keys and values."""

    kv_heads: int
    head_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        """Numbers per token."""
        return self.kv_heads * (self.head_dim + self.value_dim)


def layer_shapes(config: Any) -> list[LayerShape]:
    """Returns the shape of every layer.

    config: an object with layers, kv_heads and head_dim, and with `shapes` if layers differ.
    """
    shapes: Sequence[LayerShape] | None = getattr(config, "shapes", None)
    if shapes is not None:
        return list(shapes)
    return [LayerShape(config.kv_heads, config.head_dim, config.head_dim)] * config.layers


class LayersKV(NamedTuple):
    """Keys and values of l layers of one shape, [l, ..]: pages, and buffers of a step's nodes."""

    k: torch.Tensor  # [l, pages, 64, K, D]
    v: torch.Tensor  # [l, pages, 64, K, Dv]
    node_k: torch.Tensor  # [l, rows, K, D]
    node_v: torch.Tensor  # [l, rows, K, Dv]

    @classmethod
    def empty(
        cls,
        layers: int,
        shape: LayerShape,
        pages: int,
        rows: int,
        dtype: torch.dtype,
        device: str | torch.device,
    ) -> "LayersKV":
        """Allocates a layer's buffers as parts of one tensor, so that one call can gather from all.

        With Dv != D keys and values are two tensors.
        """
        K, D, Dv = shape
        tokens = pages * PAGE + rows
        if Dv == D:
            # [l, keys and values, tokens, K, D]
            memory = torch.empty(layers, 2, tokens, K, D, dtype=dtype, device=device).unbind(1)
        else:
            memory = tuple(
                torch.empty(layers, tokens, K, size, dtype=dtype, device=device) for size in (D, Dv)
            )
        parts = [x.split((pages * PAGE, rows), dim=1) for x in memory]
        k, v = (committed.unflatten(1, (pages, PAGE)) for committed, _ in parts)
        node_k, node_v = (nodes.zero_() for _, nodes in parts)
        return cls(k, v, node_k, node_v)


class IdleUnits(NamedTuple):
    """Copies of units of a prefix index, by which a larger cache begins."""

    key: Hashable  # of the index
    tokens: int  # of a unit
    digests: list[bytes]
    states: list[Any]  # by unit
    parts: list[tuple[torch.Tensor, torch.Tensor]]  # [l, pages of the units, 64, K, D or Dv]


class KVCache:
    """Keys and values of all layers; page tables are int32, -1 where there is no page.

    parts: buffers by shape, each for all layers of this shape. k, v, node_k, node_v: by layer,
    [pages, 64, K, D] and [rows, K, D], or Dv for values; one tensor if all layers have one shape.
    """

    def __init__(
        self,
        config: Any,  # as `layer_shapes` takes it
        *,
        slots: int,
        pages: int,
        prompt_pages: int,
        slot_pages: int,
        rows: int,
        dtype: torch.dtype,
        device: str | torch.device,
        reach: int | None = None,  # most keys that a row of any layer attends to
        unit: int | None = None,  # tokens of a unit of the prefix index; None: prompts share none
        units: int | None = None,  # most units; None: as many as there are pages
        spare: int = 0,  # pages beyond those that samples and prompts in flight need
    ):
        self.reach, self.spare = reach, spare
        self.pages, self.rows, self.dtype = pages, rows, dtype
        shapes = layer_shapes(config)
        parts = {
            shape: LayersKV.empty(shapes.count(shape), shape, pages, rows, dtype, device)
            for shape in dict.fromkeys(shapes)
        }
        self.parts = list(parts.values())
        of_layers: Any = self.parts[0]
        if len(parts) > 1:
            each = {shape: zip(*part, strict=True) for shape, part in parts.items()}
            of_layers = zip(*(next(each[shape]) for shape in shapes), strict=True)
        self.k, self.v, self.node_k, self.node_v = of_layers
        self.prompt_pages = torch.full((slots, prompt_pages), -1, dtype=torch.int32, device=device)
        self.slot_pages = torch.full((slots, slot_pages), -1, dtype=torch.int32, device=device)
        self.allocator = PageAllocator(pages)
        if unit is not None:
            self.allocator.index = PrefixIndex(unit, unit // PAGE, units)
        sizes = getattr(config, "states", None)
        # for recurrent layers, whose memory of a text is not keys and values
        self.states = StateCache(sizes, slots, rows, dtype, device) if sizes else None

    @staticmethod
    def bytes_per_page(config: Any, dtype: torch.dtype) -> int:
        return PAGE * sum(shape.numbers for shape in layer_shapes(config)) * dtype.itemsize

    def nodes(self, rows: int) -> tuple[Any, Any]:
        """The first rows of node_k and node_v, by layer."""
        if len(self.parts) == 1:
            return self.node_k[:, :rows], self.node_v[:, :rows]
        return tuple(x[:rows] for x in self.node_k), tuple(x[:rows] for x in self.node_v)

    def wraps(self, tokens: int, ahead: int) -> bool:
        """True if a text overwrites its own beginning; ahead: as in `pages_held`."""
        return pages_held(pages_for(tokens), self.reach, ahead) < pages_for(tokens)

    def take(
        self,
        table: torch.Tensor,
        row: int,
        tokens: int,
        ahead: int | None = None,
        first: Sequence[int] = (),
    ) -> list[int]:
        """Reserves pages for `tokens` tokens and writes them to a row of a page table.

        ahead: as in `pages_held`, to reuse pages that no row attends to any more; None: reuse none.
        first: pages of the prefix index that the text begins with, which get one more owner.
        """
        reach = None if ahead is None else self.reach
        self.allocator.share(first)
        try:
            own = pages_held(pages_for(tokens), reach, ahead or 0) - len(first)
            pages = [*first, *self.allocator.take(own)]
        except BaseException:
            self.allocator.give_back(first)
            raise
        table[row].fill_(-1)
        if pages:
            host = torch.tensor(in_turn(pages, tokens), dtype=torch.int32)
            table[row, : len(host)].copy_(upload(host, table.device))
        return pages

    def take_for_sample(self, tokens: int) -> list[int]:
        """Reserves pages for a sample of at most `tokens` tokens; `in_turn` gives their table."""
        return self.allocator.take(pages_held(pages_for(tokens), self.reach))

    def copy_idle(self, max_bytes: int) -> IdleUnits | None:
        """Copies of idle units, the least recently used one first; None if there are none.

        max_bytes: largest number of bytes.
        """
        index = self.allocator.index
        if index is None:
            return None
        numbers = sum(part.k[:, :1].nbytes + part.v[:, :1].nbytes for part in self.parts)
        units = index.idle()
        units = units[max(0, len(units) - max_bytes // (numbers * index.pages)) :]
        if not units:
            return None
        pages = torch.tensor([page for _, unit in units for page in unit.pages])
        pages = upload(pages, self.prompt_pages.device)
        parts = [(part.k[:, pages], part.v[:, pages]) for part in self.parts]
        states = [unit.states for _, unit in units]
        return IdleUnits(index.key, index.tokens, [digest for digest, _ in units], states, parts)

    def paste_idle(self, units: IdleUnits) -> None:
        """Keep copied units of another cache, as far as they fit."""
        index = self.allocator.index
        if index is None or index.tokens != units.tokens:
            return
        count = min(len(units.digests), len(self.allocator) // index.pages)
        if not count:
            return
        index.key = units.key
        first = len(units.digests) - count
        pages = self.allocator.take(count * index.pages)
        page_index = upload(torch.tensor(pages), self.prompt_pages.device)
        for part, (k, v) in zip(self.parts, units.parts, strict=True):
            part.k[:, page_index] = k[:, first * index.pages :]
            part.v[:, page_index] = v[:, first * index.pages :]
        for i in range(count):
            own = pages[i * index.pages : (i + 1) * index.pages]
            self.allocator.keep(units.digests[first + i], own, units.states[first + i])
            self.allocator.give_back(own)

    def reset(self) -> None:
        """Frees all pages; those of the prefix index keep their contents until they are taken."""
        self.allocator.give_back_all()
        if self.states is not None:
            self.states.prompts.clear()
        self.prompt_pages.fill_(-1)
        self.slot_pages.fill_(-1)
