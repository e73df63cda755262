"""Attention as the decoder calls it, layer by layer: for a step's rows, and for a prompt's.

A call may have properties of its own, as the calls of the module decoder do: windows, caps, sinks,
other sizes (`csd/kernels/attention/reference.py`). For a step's rows the backend's attention
computes all of these, with one work list for each combination of heads and reach of the layers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from csd.kernels.attention.commit_kv import write_rows
from csd.kernels.attention.prompt import PromptRows, VisibleKeys, attend_visible, visible_keys
from csd.kernels.attention.reference import Properties


@dataclass(slots=True)
class LayerAttention:
    """`tree_attention` over a step's layout and the keys and values of all layers.

    where: the layout, i.e. the arguments of `tree_attention` that are the same in every layer:
        tables of pages, lengths of prompts and samples, and each row's slot and ancestors.
    plan: the backend's `plan_attention`. It divides the layout among the threads or programs of the
        attention, once per step, and returns a work list.
    work: the work list of calls without properties.
    works: the work lists so far, by heads, key-value heads, window and chunk; the first layer whose
        call has other properties adds theirs.
    """

    tree_attention: Callable
    # stored as in a `KVCache`: one tensor, or one per layer
    node_k: Any  # [L, M, K, D]
    node_v: Any  # [L, M, K, Dv]
    k: Any  # [L, n_pages, 64, K, D]
    v: Any  # [L, n_pages, 64, K, Dv]
    where: dict[str, torch.Tensor]
    work: Any
    scale: float
    plan: Callable | None = None
    works: dict[tuple, Any] = field(default_factory=dict, repr=False)
    states: Any = None  # `csd.kernels.states` of the same rows, if the model has states

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        scale: float | None = None,
        properties: Properties | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q: [M, H, D]. Returns [M, H, D], or [M, H, Dv] for a call with properties."""
        tensors = self.node_k[layer], self.node_v[layer], self.k[layer], self.v[layer]
        if properties is None:
            scale = self.scale if scale is None else scale
            return self.tree_attention(q, *tensors, **self.where, scale=scale, work=self.work)
        p = properties
        key = q.shape[1], p.kv_heads, p.window, p.chunk
        if key not in self.works and self.plan is not None:
            self.works[key] = self.plan(
                heads=q.shape[1], kv_heads=p.kv_heads, window=p.window, chunk=p.chunk, **self.where
            )
        q, scale = _positive(q, p.scale)
        return self.tree_attention(
            q,
            *tensors,
            **self.where,
            scale=scale,
            work=self.works.get(key),
            window=p.window,
            chunk=p.chunk,
            softcap=p.softcap,
            sinks=sinks,
        )


@dataclass(slots=True)
class PromptAttention:
    """`prompt_attention` of chunks of prompts, whose keys and values are written to the pages.

    last: True if logits are read of the last row at most, since no token is sampled from others.
    late: True if `end` writes all layers' rows to the pages at once, which is possible if no layer
    has properties and no chunk reads the pages.
    """

    prompt_attention: Callable
    # stored as in a `KVCache`: one tensor, or one per layer
    node_k: Any  # [L, R, K, D]
    node_v: Any  # [L, R, K, Dv]
    k: Any  # [L, n_pages, 64, K, D]
    v: Any  # [L, n_pages, 64, K, Dv]
    rows: PromptRows
    scale: float
    states: Any = None  # `csd.kernels.states` of the same tokens
    late: bool = False
    last: bool = True
    # visible keys of the rows, by window and chunk
    _visible: dict[tuple, list[VisibleKeys]] = field(default_factory=dict, repr=False)

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        scale: float | None = None,
        properties: Properties | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q: [R, H, D]. Returns [R, H, D], or [R, H, Dv] for a call with properties.

        A call with properties takes rows of one prompt only.
        """
        node_k, node_v, k, v = self.node_k[layer], self.node_v[layer], self.k[layer], self.v[layer]
        rows = self.rows
        if not self.late:
            write_rows(node_k, node_v, k, v, rows.index)
        if properties is not None:
            key = properties.window, properties.chunk
            if key not in self._visible:
                (start,) = rows.chunks.starts
                self._visible[key] = visible_keys(rows.places(), start, *key)
            return attend_visible(q, k, v, self._visible[key], properties, sinks)
        keys = (node_k, node_v) if rows.begin else (rows.keys_of(k), rows.keys_of(v))
        scale = self.scale if scale is None else scale
        return self.prompt_attention(q, *keys, rows.chunks, scale)

    def end(self) -> None:
        """Writes all layers' rows to the pages if `late`; called after the last layer."""
        if self.late:
            write_rows(self.node_k, self.node_v, self.k, self.v, self.rows.index)


def _positive(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """q and a positive scale with the same scores: the maximum is taken before scaling."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
