"""Attention as the decoder calls it, a layer at a time: of a step's rows, and of a prompt's.

A call without properties is the backend's. One with them, as the module decoder's may be, is the
reference of `csd/kernels/tree_attention/properties.py` on every backend.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from csd.kernels.chunk_properties import chunk_attention_properties
from csd.kernels.commit_kv import write_prompt
from csd.kernels.tree_attention.placed_keys import PlacedGroup, place_keys
from csd.kernels.tree_attention.properties import (
    Properties,
    as_heads,
    tree_attention_properties,
)


@dataclass(slots=True)
class LayerAttention:
    """`tree_attention` over a step's layout and the keys and values of all layers."""

    tree_attention: Callable
    node_k: torch.Tensor  # [L, M, K, D]
    node_v: torch.Tensor  # [L, M, K, D]
    k: torch.Tensor  # [L, n_pages, 64, K, D]
    v: torch.Tensor  # [L, n_pages, 64, K, D]
    where: dict[str, torch.Tensor]
    work: Any  # what `plan_attention` made of the layout
    scale: float
    states: Any = None  # `csd.kernels.layer_states` of the same rows, of models that have some
    _placed: list[PlacedGroup] | None = field(default=None, repr=False)

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        scale: float | None = None,
        properties: Properties | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q: [M, H, D]. Returns [M, H, D], or [M, H, Dv] of a call with properties."""
        found = self.node_k[layer], self.node_v[layer], self.k[layer], self.v[layer]
        if properties is None:
            scale = self.scale if scale is None else scale
            return self.tree_attention(q, *found, **self.where, scale=scale, work=self.work)
        if self._placed is None:
            self._placed = place_keys(**self.where)
        found = _of_sizes(*found, properties)
        return tree_attention_properties(q, *found, self._placed, properties, sinks)


@dataclass(slots=True)
class PromptAttention:
    """`chunk_attention` of a prompt's tokens from `start` on, which go to the prompt's pages."""

    of_prompt: ClassVar[bool] = True  # nobody samples from these rows

    chunk_attention: Callable
    node_k: torch.Tensor  # [L, R, K, D]
    node_v: torch.Tensor  # [L, R, K, D]
    k: torch.Tensor  # [L, n_pages, 64, K, D]
    v: torch.Tensor  # [L, n_pages, 64, K, D]
    pages: torch.Tensor  # [PP] int32
    start: int
    scale: float
    states: Any = None  # `csd.kernels.layer_states` of the same tokens

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        scale: float | None = None,
        properties: Properties | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q: [R, H, D]. Returns [R, H, D], or [R, H, Dv] of a call with properties."""
        node_k, node_v, k, v = self.node_k[layer], self.node_v[layer], self.k[layer], self.v[layer]
        write_prompt(node_k, node_v, k, v, self.pages, self.start)
        if properties is None:
            scale = self.scale if scale is None else scale
            return self.chunk_attention(q, k, v, self.pages, self.start, scale)
        k, v = _of_sizes(node_k, node_v, k, v, properties)[2:]
        return chunk_attention_properties(q, k, v, self.pages, self.start, properties, sinks)


def _of_sizes(
    node_k: torch.Tensor, node_v: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: Properties
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layer's keys and values as heads of a call's own sizes."""
    keys, values = (p.kv_heads, p.head_dim), (p.kv_heads, p.value_dim)
    return (
        as_heads(node_k, *keys), as_heads(node_v, *values), as_heads(k, *keys),
        as_heads(v, *values),
    )  # fmt: skip
