"""Attention of a differentiable pass: the forward of an exact engine, and its gradient.

A prompt's rows, all but the last token's, are read in the engine's chunks (`prompt_attention`), the
others as draft trees (`tree_attention`): each run of rows is cut into chains, whose earlier rows
are committed tokens in pages. A row's result in an exact engine does not depend on whether a key is
a node or committed, so the bits are those of sampling. The gradient takes all rows at once
(`packed_attention_backward`).
"""

from collections.abc import Iterator
from typing import Any

import torch

from csd.gradient.rows import Rows
from csd.kernels.attention.layer import LayerAttention
from csd.kernels.attention.packed import PackedLayout, packed_attention_backward
from csd.kernels.attention.prompt import Chunks, attend_visible, visible_keys
from csd.kernels.attention.reference import Properties
from csd.kernels.ops import Ops
from csd.models.fused.config import ModelConfig, scale_of
from csd.state.kv_cache import PAGE, pages_for
from csd.state.pool import MAX_DEPTH, MAX_NODES


class RowsAttention:
    """Attention of `Rows` in one decoder, layer by layer.

    chunk: prompt tokens that the engine reads per pass.
    """

    def __init__(self, rows: Rows, ops: Ops, config: ModelConfig, chunk: int):
        self.rows, self.ops, self.config = rows, ops, config
        self.device = rows.token.device
        self.scale = scale_of(config)
        # for each call of `prompt_attention`: rows [n], rows of their keys [t], and the chunks
        self._prompts = [*self._prompt_chunks(chunk)]
        # keys and values of the nodes and in pages, of the layer that is computed, by its index
        self._kv: tuple[dict, dict, dict, dict] = ({}, {}, {}, {})
        tables, index = self._pages()
        self._index = torch.tensor(index, device=self.device)
        # an exact kernel on a GPU takes trees of the engine's depth
        width = MAX_DEPTH + 1 if ops.launches else MAX_NODES
        longest = max((run.stop - run.start for run in rows.runs), default=0)
        # for each call of `tree_attention`: rows [n], and the attention of their chains
        self._chains = [self._chain(at, width, *tables) for at in range(0, longest, width)]

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,  # [R, H, D]
        k: torch.Tensor,  # [R, K, D]
        v: torch.Tensor,  # [R, K, D]
        properties: Properties | None = None,
    ) -> torch.Tensor:
        """Returns [R, H, D]; differentiable."""
        out: torch.Tensor = _Attend.apply(q, k, v, self, layer, properties)
        return out

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        properties: Properties | None,
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        for at, keys, chunks in self._prompts:
            if properties is None:
                attended = self.ops.prompt_attention(q[at], k[keys], v[keys], chunks, self.scale)
                out.index_copy_(0, at, attended)
                continue
            parts = at.split(chunks.rows), keys.split(chunks.keys), chunks.starts
            for of_chunk, rows, start in zip(*parts, strict=True):
                seen = visible_keys(rows, start, properties.window, properties.chunk)
                attended = attend_visible(q[of_chunk], k[None], v[None], seen, properties)
                out.index_copy_(0, of_chunk, attended)
        pages = [x[self._index].view(-1, PAGE, *x.shape[1:]) for x in (k, v)]
        for at, attention in self._chains:
            for buffers, x in zip(self._kv, (k[at], v[at], *pages), strict=True):
                buffers[layer] = x
            out.index_copy_(0, at, attention(layer, q[at], properties=properties))
        for buffers in self._kv:
            buffers.clear()
        return out

    def _prompt_chunks(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, Chunks]]:
        """Chunk c of every prompt that has one, for each c; the last row is a tree's root."""
        longest = max(group.prompt - 1 for group in self.rows.groups)
        for start in range(0, longest, size):
            groups = [group for group in self.rows.groups if group.prompt - 1 > start]
            stops = [min(start + size, group.prompt - 1) for group in groups]
            rows = [range(g.start + start, g.start + n) for g, n in zip(groups, stops, strict=True)]
            keys = [range(g.start, g.start + n) for g, n in zip(groups, stops, strict=True)]
            lengths = tuple(map(len, rows))
            ends = [torch.tensor([0, *map(len, x)]).cumsum(0) for x in (rows, keys)]
            sizes = Chunks(
                (start,) * len(groups), lengths, *(x.int().to(self.device) for x in ends)
            )
            yield self._rows_of(rows), self._rows_of(keys), sizes

    def _rows_of(self, ranges: list[range]) -> torch.Tensor:
        return torch.tensor([i for each in ranges for i in each], device=self.device)

    def _pages(self) -> tuple[tuple[list[list[int]], list[list[int]]], list[int]]:
        """Page lists of prompts and of runs, and the row of each entry of the pages."""
        index: list[int] = []

        def pages_of(rows: list[int]) -> list[int]:
            first, count = len(index) // PAGE, pages_for(len(rows))
            index.extend([*rows, *[0] * (count * PAGE - len(rows))])
            return [*range(first, first + count)]

        prompts = [pages_of([*range(g.start, g.start + g.prompt - 1)]) for g in self.rows.groups]
        paths = [pages_of([*run.above, *range(run.start, run.stop)]) for run in self.rows.runs]
        if not index:
            pages_of([0])
        return (prompts, paths), index

    def _chain(
        self, at: int, width: int, prompts: list[list[int]], paths: list[list[int]]
    ) -> tuple[torch.Tensor, LayerAttention]:
        """Rows at .. at + width of every run that is that long, each a chain of its slot."""
        slots = [
            (run, path)
            for run, path in zip(self.rows.runs, paths, strict=True)
            if run.stop - run.start > at
        ]
        groups = sorted({run.group for run, _ in slots})
        nodes = [min(width, run.stop - run.start - at) for run, _ in slots]
        ends = torch.tensor([0, *nodes]).cumsum(0).tolist()
        of_group = [sum(run.group == g for run, _ in slots) for g in groups]
        bounds = [ends[i] for i in torch.tensor([0, *of_group]).cumsum(0).tolist()]
        # as signed numbers: the word of 64 rows has the sign bit
        words = [(1 << j) - 1 if j < 64 else -1 for n in nodes for j in range(1, n + 1)]
        lengths = [self.rows.groups[g].prompt - 1 for g in groups]
        of_slots = [i for i, n in enumerate(nodes) for _ in range(n)]
        layout = dict(
            prompt_pages=_table([prompts[g] for g in groups]),
            prompt_len=torch.tensor(lengths, dtype=torch.int32),
            slot_pages=_table([path for _, path in slots]),
            slot_len=torch.tensor([len(run.above) + at for run, _ in slots], dtype=torch.int32),
            slot=torch.tensor(of_slots, dtype=torch.int32),
            ancestors=torch.tensor(words, dtype=torch.int64),
            slot_start=torch.tensor(ends[:-1], dtype=torch.int32),
            slot_nodes=torch.tensor(nodes, dtype=torch.int32),
            group_start=torch.tensor(bounds, dtype=torch.int32),
        )
        layout = {name: x.to(self.device) for name, x in layout.items()}
        c, plan = self.config, self.ops.plan_attention
        work = plan(heads=c.heads, kv_heads=c.kv_heads, **layout)
        starts = [run.start + at for run, _ in slots]
        rows = self._rows_of([range(s, s + n) for s, n in zip(starts, nodes, strict=True)])
        attend, (node_k, node_v, k, v) = self.ops.tree_attention, self._kv
        attention = LayerAttention(attend, node_k, node_v, k, v, layout, work, self.scale, plan)
        attention.works[c.heads, c.kv_heads, None, None] = work
        return rows, attention


def _table(pages: list[list[int]]) -> torch.Tensor:
    width = max(1, *map(len, pages))
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in pages], dtype=torch.int32)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        q, k, v, attention, layer, properties = inputs
        out: torch.Tensor = attention.forward(layer, q, k, v, properties)
        ctx.save_for_backward(q, k, v, out)
        ctx.attention, ctx.properties = attention, properties
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        rows, p = ctx.attention.rows, ctx.properties
        scale = ctx.attention.scale if p is None else p.scale
        named = {} if p is None else dict(window=p.window, chunk=p.chunk, softcap=p.softcap)
        q, k, v, out = ctx.saved_tensors
        layout = PackedLayout(rows.end, rows.position)
        of_qkv = packed_attention_backward(grads[0], q, k, v, out, None, layout, scale, **named)
        return *of_qkv[:3], None, None, None
