"""A feed-forward layer of experts; each row uses k of them.

    p = softmax(router x),   S = the k largest of p,   y = sum over e in S of p_e down_e(swiglu_e x)

with p in float32, divided by its sum over S if `sum_to_one`, and rounded to x's dtype before it is
multiplied, in the order of casts of transformers' `Qwen3MoeTopKRouter`. On a CPU the chosen experts
run one after the other, each on its rows, so the weights of other experts are not read; the
products are the decoder's, so exact ones stay exact. On a GPU the rows are sorted by expert, and
`torch.nn.functional.grouped_mm`, which takes bfloat16, multiplies each row by its expert's matrix:
nothing is read on the host.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(slots=True)
class Experts:
    """Weights of a layer's E experts, each of width F."""

    router: torch.Tensor  # [E, hidden]
    gate_up: torch.Tensor  # [E, 2 F, hidden]
    down: torch.Tensor  # [E, hidden, F]
    per_token: int
    sum_to_one: bool

    def __call__(self, product: Callable, swiglu: Callable, x: torch.Tensor) -> torch.Tensor:
        """x: [M, hidden]. Returns [M, hidden]; product: x, weight -> x weight^T."""
        weight, chosen = self.routed(product(x, self.router))
        run = self._grouped if x.is_cuda else self._one_by_one
        each = run(product, swiglu, x, chosen).view(*chosen.shape, -1) * weight[..., None]
        total = each[:, 0].to(torch.promote_types(x.dtype, torch.float32))
        # added in the order of the row's own experts, independent of the other rows
        for k in range(1, self.per_token):
            total = total + each[:, k]
        return total.to(x.dtype)

    def routed(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits: [M, E]. Returns the weights [M, k] in its dtype, and the experts [M, k]."""
        weight, chosen = logits.softmax(-1, dtype=torch.float32).topk(self.per_token)
        if self.sum_to_one:
            weight = weight / weight.sum(-1, keepdim=True)
        return weight.to(logits.dtype), chosen

    def _one_by_one(
        self, product: Callable, swiglu: Callable, x: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """Unweighted outputs [M k, hidden] of the rows' experts, computed expert by expert."""
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.router)).tolist()
        out = x.new_empty(order.shape[0], x.shape[1])
        for e, rows in enumerate(order.split(counts)):
            if len(rows):
                up = product(x[rows // self.per_token], self.gate_up[e])
                out[rows] = product(swiglu(up), self.down[e])
        return out

    def _grouped(
        self, product: Callable, swiglu: Callable, x: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """The same as `_one_by_one`, by grouped products, without reads on the host."""
        ids, order = chosen.flatten().sort(stable=True)
        each = torch.arange(len(self.router), device=x.device)
        ends = torch.searchsorted(ids, each, right=True).to(torch.int32)
        up = F.grouped_mm(x[order // self.per_token], self.gate_up.transpose(-2, -1), offs=ends)
        down = F.grouped_mm(swiglu(up), self.down.transpose(-2, -1), offs=ends)
        return torch.empty_like(down).index_copy_(0, order, down)
