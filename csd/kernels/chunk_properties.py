"""Attention of a chunk of a prompt with a window, a chunk size, a cap on scores or sinks.

The formula is in `csd/kernels/tree_attention/reference.py`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from csd.kernels.tree_attention.placed_keys import in_reach
from csd.kernels.tree_attention.reference import Properties, weights, without_autocast
from csd.state.kv_cache import PAGE


class VisibleKeys(NamedTuple):
    """Keys of a prompt that at least one row of a chunk attends to, in order of position."""

    places: torch.Tensor  # [T] int64, indices among the tokens of all pages
    visible: torch.Tensor  # [R, T] bool: the row attends to the key


def visible_keys(
    pages: torch.Tensor,  # [PP] int32, the group's row of prompt_pages
    start: int,
    rows: int,
    window: int | None,
    chunk: int | None,
) -> VisibleKeys:
    """Keys that at least one row at positions start .. start + rows - 1 attends to."""
    end = start + rows
    first = 0 if window is None else max(0, start - window + 1)
    if chunk is not None:
        first = max(first, start // chunk * chunk)
    at, own = (torch.arange(*ends, device=pages.device) for ends in ((first, end), (start, end)))
    places = pages.long()[at // PAGE] * PAGE + at % PAGE
    return VisibleKeys(places, in_reach(own[:, None], at, window, chunk))


@without_autocast
def attend_visible(
    q: torch.Tensor,  # [R, H, D]
    k_pages: torch.Tensor,  # [n_pages, 64, K, D]
    v_pages: torch.Tensor,  # [n_pages, 64, K, Dv]
    keys: VisibleKeys,
    properties: Properties,
    sinks: torch.Tensor | None = None,  # [H]
) -> torch.Tensor:
    """Returns the attention [R, H, Dv] over the visible keys, which are read from the pages."""
    p, (places, visible) = properties, keys
    k, v = (x.flatten(0, 1)[places] for x in (k_pages, v_pages))
    if p.softcap is None and sinks is None:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=p.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries = q.to(dtype).unflatten(1, (p.kv_heads, -1)) * p.scale
    score = torch.einsum("rkgd,nkd->kgrn", queries, k.to(dtype))
    weight = weights(score, visible, p.softcap, sinks)
    return torch.einsum("kgrn,nkd->rkgd", weight, v.to(dtype)).flatten(1, 2).to(q.dtype)
