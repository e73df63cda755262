"""Norms of a decoder's layers according to its config, and their residual sums."""

from typing import Any

import torch

from csd.kernels.ops import Ops
from csd.models.config import ModelConfig


class Norms:
    """Mixin of a decoder with its norms."""

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
        """Returns (norm of x + residual, x + residual); without a weight, the sum twice."""
        if weight is not None:
            return self._norm(ops, x, weight, residual, **rows)
        total = x if residual is None else residual + x
        return total, total

    def _left(self, ops: Ops, x: torch.Tensor, norm: torch.Tensor | None = None) -> torch.Tensor:
        """Addend of a layer's part to the residual: x, normed if `norm` is given, and scaled."""
        if norm is not None:
            x, _ = self._norm(ops, x, norm)
        return x if self.config.residual_scale == 1 else x * self.config.residual_scale

    def _whole_norm(self, ops: Ops, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """Norm of whole rows x [M, W], which may be slices of wider rows."""
        return self._norm(ops, x[:, None], weight)[0][:, 0]
