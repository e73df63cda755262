"""Plain PyTorch reference of the tree attention, slot by slot.

The formula is in `csd/kernels/tree_attention/`. `batched.py` computes the same in fewer calls.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from csd.state.kv_cache import PAGE


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


@without_autocast
def tree_attention_ref(
    q: torch.Tensor,  # [M, H, D]
    node_k: torch.Tensor,  # [M, K, D]
    node_v: torch.Tensor,  # [M, K, D]
    k_pages: torch.Tensor,  # [n_pages, 64, K, D]
    v_pages: torch.Tensor,  # [n_pages, 64, K, D]
    prompt_pages: torch.Tensor,  # [G, PP] int32
    prompt_len: torch.Tensor,  # [G] int32
    slot_pages: torch.Tensor,  # [S, SP] int32
    slot_len: torch.Tensor,  # [S] int32
    slot: torch.Tensor,  # [M] int32
    ancestors: torch.Tensor,  # [M] int64
    slot_start: torch.Tensor,  # [S] int32
    slot_nodes: torch.Tensor,  # [S] int32
    group_start: torch.Tensor,  # [G + 1] int32
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns [M, H, D], computed in at least float32. Reads the layout on the host."""
    K, D = node_k.shape[1:]
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q) if out is None else out.zero_()
    bounds = group_start.tolist()
    for s, (first, rows) in enumerate(zip(slot_start.tolist(), slot_nodes.tolist(), strict=True)):
        if not rows:
            continue
        group = next(g for g in range(len(bounds)) if first < bounds[g + 1])
        mine = slice(first, first + rows)
        prompt = _places(prompt_pages[group], int(prompt_len[group]))
        committed = _places(slot_pages[s], int(slot_len[s]))
        # [T, K, D]
        k, v = (
            torch.cat((pages.flatten(0, 1)[torch.cat((prompt, committed))], nodes[mine])).to(dtype)
            for pages, nodes in ((k_pages, node_k), (v_pages, node_v))
        )
        # [rows, K, H / K, D] times [T, K, D]
        queries = q[mine].to(dtype).view(rows, K, -1, D) * scale
        score = torch.einsum("rkhd,tkd->rkht", queries, k)
        bit = torch.arange(rows, device=q.device)
        hidden = (ancestors[mine, None] >> bit) & 1 == 0
        score[..., -rows:].masked_fill_(hidden[:, None, None], float("-inf"))
        result = torch.einsum("rkht,tkd->rkhd", score.softmax(-1), v)
        out[mine] = result.reshape(rows, -1, D).to(q.dtype)
    return out


def _places(pages: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the first `count` tokens of a page list, among all tokens of the pages."""
    at = torch.arange(count, device=pages.device)
    return pages.long()[at // PAGE] * PAGE + at % PAGE
