"""References of the packed attention and of its gradients in plain PyTorch, with a [R, R] mask.

The formulas are in `csd/kernels/attention/packed/`. Both compute in at least float32.
"""

from typing import Any

import torch

from csd.kernels.attention.packed.layout import visible_rows
from csd.kernels.attention.reference import without_autocast


def _scores(
    q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float | None, *layout: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """[K, H / K, R, R]: scores, -inf where a row does not attend, and their derivatives by q . k

    q: [R, K, H / K, D], k: [R, K, D]. layout: as `visible_rows` takes it.
    """
    score = torch.einsum("rkgd,nkd->kgrn", q, k) * scale
    slope = torch.full_like(score, scale)
    if softcap is not None:
        tanh = torch.tanh(score / softcap)
        score, slope = softcap * tanh, slope * (1 - tanh * tanh)
    return score.masked_fill(~visible_rows(*layout), float("-inf")), slope


def _log_sum(score: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """[K, H / K, R]"""
    lse = score.logsumexp(-1)
    if sinks is None:
        return lse
    return torch.logaddexp(lse, sinks.to(lse.dtype).view(*lse.shape[:2], 1))


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@without_autocast
def packed_attention_ref(
    q: torch.Tensor,  # [R, H, D]
    k: torch.Tensor,  # [R, K, D]
    v: torch.Tensor,  # [R, K, Dv]
    end: torch.Tensor,  # [R] int32
    position: torch.Tensor,  # [R] int32
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [H]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out [R, H, Dv] and lse [R, H]."""
    wide = wide_dtype(q)
    rows = q.to(wide).unflatten(1, (k.shape[1], -1))
    score, _ = _scores(rows, k.to(wide), scale, softcap, end, position, window, chunk)
    lse = _log_sum(score, sinks)
    out = torch.einsum("kgrn,nkd->rkgd", (score - lse[..., None]).exp(), v.to(wide))
    return out.flatten(1, 2).to(q.dtype), lse.flatten(0, 1).T.contiguous()


@without_autocast
def packed_attention_backward_ref(
    grad: torch.Tensor,  # [R, H, Dv]
    q: torch.Tensor,  # [R, H, D]
    k: torch.Tensor,  # [R, K, D]
    v: torch.Tensor,  # [R, K, Dv]
    out: torch.Tensor,  # [R, H, Dv]
    lse: torch.Tensor | None,  # [R, H]
    end: torch.Tensor,  # [R] int32
    position: torch.Tensor,  # [R] int32
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [H]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns dq [R, H, D], dk [R, K, D], dv [R, K, Dv] and dsinks: [H], or [0] without sinks."""
    wide, K = wide_dtype(q), k.shape[1]
    rows, dout, keys, values = q.to(wide), grad.to(wide), k.to(wide), v.to(wide)
    rows, dout = (x.unflatten(1, (K, -1)) for x in (rows, dout))
    score, slope = _scores(rows, keys, scale, softcap, end, position, window, chunk)
    # [K, H / K, R]
    total = _log_sum(score, sinks) if lse is None else lse.to(wide).T.unflatten(0, (K, -1))
    delta = (dout * out.to(wide).view_as(dout)).sum(-1).permute(1, 2, 0)
    weight = (score - total[..., None]).exp()
    dv = torch.einsum("kgrn,rkgd->nkd", weight, dout)
    dweight = torch.einsum("rkgd,nkd->kgrn", dout, values)
    dscore = weight * (dweight - delta[..., None]) * slope
    dq = torch.einsum("kgrn,nkd->rkgd", dscore, keys)
    dk = torch.einsum("kgrn,rkgd->nkd", dscore, rows)
    dsinks = grad_of_sinks(sinks, total.flatten(0, 1).T, delta.flatten(0, 1).T, q)
    return dq.flatten(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


def grad_of_sinks(
    sinks: torch.Tensor | None,  # [H]
    lse: torch.Tensor,  # [R, H]
    delta: torch.Tensor,  # [R, H]
    q: torch.Tensor,
) -> torch.Tensor:
    """[H]: minus the sum over rows of the sink's weight times delta; [0] without sinks."""
    if sinks is None:
        return q.new_empty(0)
    weight = (sinks.to(lse.dtype) - lse.contiguous()).exp()
    return -(weight * delta.contiguous()).sum(0).to(sinks.dtype)
