"""Gradient of the attention of packed rows, in plain PyTorch, group by group."""

import torch

from csd.gradient.rows import Rows
from csd.kernels.attention.reference import in_reach, weights


def packed_backward(
    grad: torch.Tensor,  # [R, H, D]
    q: torch.Tensor,  # [R, H, D]
    k: torch.Tensor,  # [R, K, D]
    v: torch.Tensor,  # [R, K, D]
    out: torch.Tensor,  # [R, H, D]
    rows: Rows,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, computed in at least float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    K = k.shape[1]
    for group in rows.groups:
        at = slice(group.start, group.stop)
        i = torch.arange(group.start, group.stop, device=q.device)
        below = (i <= i[:, None]) & (i[:, None] < rows.end[at])
        position = rows.position[at]
        seen = below & in_reach(position[:, None], position, window, chunk)
        # [K, H / K, n, D]
        queries, gradient, result = (
            x[at].to(wide).unflatten(1, (K, -1)).permute(1, 2, 0, 3) for x in (q, grad, out)
        )
        keys, values = (x[at].to(wide).transpose(0, 1)[:, None] for x in (k, v))
        score = queries @ keys.mT * scale
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        weight = score.masked_fill(~seen, -torch.inf).softmax(-1)
        d_score = weight * (gradient @ values.mT - (gradient * result).sum(-1, keepdim=True))
        if softcap is not None:
            d_score = d_score * (1 - (score / softcap) ** 2)
        d_score = d_score * scale
        dq[at] = (d_score @ keys).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
        dk[at] = (d_score.mT @ queries).sum(1).transpose(0, 1).to(k.dtype)
        dv[at] = (weight.mT @ gradient).sum(1).transpose(0, 1).to(v.dtype)
    return dq, dk, dv


def packed_attention(
    q: torch.Tensor,  # [R, H, D]
    k: torch.Tensor,  # [R, K, D]
    v: torch.Tensor,  # [R, K, Dv]
    rows: Rows,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [H]
) -> torch.Tensor:
    """Attention [R, H, Dv] of packed rows, in at least float32; differentiable."""
    wide, K, outs = torch.promote_types(q.dtype, torch.float32), k.shape[1], []
    for group in rows.groups:
        at = slice(group.start, group.stop)
        i = torch.arange(group.start, group.stop, device=q.device)
        below = (i <= i[:, None]) & (i[:, None] < rows.end[at])
        position = rows.position[at]
        seen = below & in_reach(position[:, None], position, window, chunk)
        queries = q[at].to(wide).unflatten(1, (K, -1)).permute(1, 2, 0, 3)
        keys, values = (x[at].to(wide).transpose(0, 1)[:, None] for x in (k, v))
        weight = weights(queries @ keys.mT * scale, seen, softcap, sinks)
        outs.append((weight @ values).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype))
    return torch.cat(outs)
