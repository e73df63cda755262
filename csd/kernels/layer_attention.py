"""Attention of a step's rows as the decoder calls it, a layer at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


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

    def __call__(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q: [M, H, D]. Returns [M, H, D]."""
        return self.tree_attention(
            q, self.node_k[layer], self.node_v[layer], self.k[layer], self.v[layer], **self.where,
            scale=self.scale, work=self.work,
        )  # fmt: skip
