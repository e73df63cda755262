"""Norms of a decoder's layers, by its config, and the residual that they add to."""

from typing import Any

import torch

from csd.kernels.ops import Ops
from csd.models.config import ModelConfig


class Norms:
    """Methods of a decoder."""

    config: ModelConfig

    def _norm(
        self, ops: Ops, x: torch.Tensor, weight: Any, *residual: torch.Tensor | None,
        **rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        kind = dict(plus_one=True) if self.config.plus_one else {}
        return ops.rms_norm(x, weight, self.config.norm_eps, *residual, **rows, **kind)

    def _normed(
        self,
        ops: Ops,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        residual: torch.Tensor | None,
        **rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and the sum; without a weight the sum is both."""
        if weight is not None:
            return self._norm(ops, x, weight, residual, **rows)
        total = x if residual is None else residual + x
        return total, total

    def _left(self, ops: Ops, x: torch.Tensor, norm: torch.Tensor | None = None) -> torch.Tensor:
        """The addend of a part of a layer to the residual."""
        if norm is not None:
            x, _ = self._norm(ops, x, norm)
        return x if self.config.residual_scale == 1 else x * self.config.residual_scale

    def _whole_norm(self, ops: Ops, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """The norm of rows that lie in wider ones."""
        return self._norm(ops, x[:, None], weight)[0][:, 0]
