"""Tree attention of the backend "reference": batched, or with all properties of a call."""

from typing import Any

import torch

from csd.kernels.tree_attention.batched import tree_attention_batched
from csd.kernels.tree_attention.batched_work import BatchedWork, batched_work
from csd.kernels.tree_attention.placed_keys import place_keys
from csd.kernels.tree_attention.properties import Properties, tree_attention_properties


def plan_reference(
    heads: int, kv_heads: int, window: int | None = None, chunk: int | None = None,
    **layout: torch.Tensor,
) -> BatchedWork:  # fmt: skip
    """`batched_work` of the layout; it does not depend on window and chunk."""
    return batched_work(heads, kv_heads, **layout)


def tree_attention_reference(
    q: torch.Tensor,  # [M, H, D]
    node_k: torch.Tensor,  # [M, K, D]
    node_v: torch.Tensor,  # [M, K, Dv]
    k_pages: torch.Tensor,  # [n_pages, 64, K, D]
    v_pages: torch.Tensor,  # [n_pages, 64, K, Dv]
    *,
    scale: float,
    work: BatchedWork | None = None,
    out: torch.Tensor | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    **layout: Any,
) -> torch.Tensor:
    """Returns [M, H, Dv]; `layout` and `work` as in `tree_attention_batched`."""
    operands = q, node_k, node_v, k_pages, v_pages
    (K, D), Dv = node_k.shape[1:], node_v.shape[2]
    if window is chunk is softcap is sinks is None and Dv == D:
        return tree_attention_batched(*operands, **layout, scale=scale, work=work, out=out)
    kept: dict = {} if work is None else work.kept
    if "placed" not in kept:
        kept["placed"] = place_keys(**layout)
    properties = Properties(K, D, Dv, scale, window, chunk, softcap)
    found = tree_attention_properties(*operands, kept["placed"], properties, sinks)
    return found if out is None else out.copy_(found)
