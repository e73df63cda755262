"""`chunk_attention` with the properties of `csd/kernels/tree_attention/properties.py`."""

import torch
import torch.nn.functional as F

from csd.kernels.tree_attention.placed_keys import in_reach
from csd.kernels.tree_attention.properties import Properties, weights
from csd.kernels.tree_attention.reference import without_autocast
from csd.state.kv_cache import PAGE


@without_autocast
def chunk_attention_properties(
    q: torch.Tensor,  # [R, H, D]
    k_pages: torch.Tensor,  # [n_pages, 64, K, D]
    v_pages: torch.Tensor,  # [n_pages, 64, K, Dv]
    pages: torch.Tensor,  # [PP] int32, the group's row of prompt_pages
    start: int,
    properties: Properties,
    sinks: torch.Tensor | None = None,  # [H]
) -> torch.Tensor:
    """Row r is the prompt's token start + r, whose keys are in the pages. Returns [R, H, Dv]."""
    p, end = properties, start + q.shape[0]
    # what no row sees is not read
    first = 0 if p.window is None else max(0, start - p.window + 1)
    if p.chunk is not None:
        first = max(first, start // p.chunk * p.chunk)
    at, rows = (torch.arange(*ends, device=q.device) for ends in ((first, end), (start, end)))
    places = pages.long()[at // PAGE] * PAGE + at % PAGE
    visible = in_reach(rows[:, None], at, p.window, p.chunk)
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
