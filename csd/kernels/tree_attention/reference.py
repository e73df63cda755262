"""Plain PyTorch reference of the tree attention, group by group.

    s(m, t) = cap(scale * q[m, h] . k[t, h // (H / K)]),   cap(x) = softcap * tanh(x / softcap)
    out[m, h] = sum of w(m, t) v[t, h // (H / K)] over the keys t that row m sees, where
    w(m, t) = exp(s(m, t)) / (sum over these of exp(s(m, .)) + exp(sink[h]))

A row attends to the keys of P(m), C(m) and N(m) (`csd/kernels/tree_attention/`) that are fewer than
`window` positions before it and in its own chunk: position // chunk equals the row's.

`place_keys` reads the step's layout on the host, once for all layers. Sums of a row are added in an
order that depends on the step's other rows.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch

from csd.kernels.tree_attention.placed_keys import PlacedGroup, place_keys


def without_autocast(function: Callable) -> Callable:
    """Wraps a function to run without autocast, which would round its products."""

    @wraps(function)
    def call(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kind = q.device.type
        if not torch.is_autocast_enabled(kind):
            return function(q, *args, **kwargs)
        with torch.autocast(kind, enabled=False):
            return function(q, *args, **kwargs)

    return call


class Properties(NamedTuple):
    """Properties of one attention call: its sizes, and its rules for scores."""

    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None


def plan_reference(
    heads: int,
    kv_heads: int,
    window: int | None = None,
    chunk: int | None = None,
    **layout: torch.Tensor,
) -> list[PlacedGroup]:
    """`place_keys` of the layout; it does not depend on heads, window and chunk."""
    return place_keys(**layout)


@without_autocast
def tree_attention_ref(
    q: torch.Tensor,  # [M, H, D]
    node_k: torch.Tensor,  # [M, K, D]
    node_v: torch.Tensor,  # [M, K, Dv]
    k_pages: torch.Tensor,  # [n_pages, 64, K, D]
    v_pages: torch.Tensor,  # [n_pages, 64, K, Dv]
    *,
    scale: float,
    work: list[PlacedGroup] | None = None,
    out: torch.Tensor | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [H]
    **layout: torch.Tensor,
) -> torch.Tensor:
    """Returns [M, H, Dv], computed in at least float32. Rows of no slot give zeros.

    layout: the fields of a `TreeLayout`. work: the layout's `plan_reference`, made if None.
    """
    K, Dv = node_k.shape[1], node_v.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:2], Dv) if out is None else out
    out.zero_()
    k_tokens, v_tokens = k_pages.flatten(0, 1), v_pages.flatten(0, 1)
    for group in place_keys(**layout) if work is None else work:
        # [T, r, K, H / K, D]
        rows = q[group.row].to(dtype).unflatten(2, (K, -1)) * scale
        prompt_k, prompt_v = (x[group.prompt].to(dtype) for x in (k_tokens, v_tokens))
        # [T, C + r, K, ..]
        own_k = torch.cat((k_tokens[group.committed], node_k[group.row]), 1).to(dtype)
        # unwritten memory may be NaN, and a weight of zero does not hide it
        old_v = v_tokens[group.committed].masked_fill(group.absent[..., None, None], 0)
        own_v = torch.cat((old_v, node_v[group.row]), 1).to(dtype)
        score = torch.cat(
            (
                torch.einsum("trkgd,pkd->tkgrp", rows, prompt_k),
                torch.einsum("trkgd,tnkd->tkgrn", rows, own_k),
            ),
            -1,
        )
        visible = group.visible(window, chunk)[:, None, None]
        weight = weights(score, visible, softcap, sinks)
        prompt, own = weight.split((prompt_k.shape[0], own_k.shape[1]), -1)
        result = torch.einsum("tkgrp,pkd->trkgd", prompt, prompt_v)
        result += torch.einsum("tkgrn,tnkd->trkgd", own, own_v)
        out[group.row[group.there]] = result.flatten(2, 3)[group.there].to(q.dtype)
    return out


def weights(
    score: torch.Tensor,  # [.., K, H / K, r, n]
    visible: torch.Tensor,  # bool, broadcast to it
    softcap: float | None,
    sinks: torch.Tensor | None,  # [H]
) -> torch.Tensor:
    """Weights of the keys; a row without visible keys has NaN, or zeros if there are sinks."""
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    score = score.masked_fill(~visible, float("-inf"))
    if sinks is None:
        return score.softmax(-1)
    sink = sinks.to(score.dtype).view(*score.shape[-4:-2], 1, 1)
    return torch.cat((score, sink.expand(*score.shape[:-1], 1)), -1).softmax(-1)[..., :-1]
