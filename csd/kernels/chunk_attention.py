"""Causal attention of a chunk of a prompt over the prompt so far, out of its pages.

    out[r, h] = sum over t <= start + r of softmax(scale * q[r, h] . k[t, h // (H / K)]) v[t, ..]

The chunk's own keys and values must already be in the pages (`write_prompt`), so that keys and
values are one run of memory whenever the pages follow one another. PyTorch's own attention does
the rest, on every device: a prompt is read once, and its kernels are hard to beat at that.
"""

import torch
import torch.nn.functional as F
from torch.backends import cuda as backend

from csd.kernels.checks import check_tensor
from csd.state.kv_cache import PAGE

aten = torch.ops.aten


def chunk_attention(
    q: torch.Tensor,  # [R, H, D]
    k_pages: torch.Tensor,  # [n_pages, 64, K, D]
    v_pages: torch.Tensor,  # [n_pages, 64, K, D]
    pages: torch.Tensor,  # [PP] int32, the group's row of prompt_pages
    start: int,
    scale: float,
) -> torch.Tensor:
    """Row r is the prompt's token start + r. Returns [R, H, D]."""
    if q.dim() != 3 or k_pages.dim() != 4 or not k_pages.shape[2] or q.shape[1] % k_pages.shape[2]:
        raise ValueError(
            "q and k_pages must be [R, H, D] and [n_pages, 64, K, D] with H a multiple of K, got "
            f"{tuple(q.shape)} and {tuple(k_pages.shape)}"
        )
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
        shape = (k_pages.shape[0], PAGE, k_pages.shape[2], q.shape[2])
        check_tensor(name, x, shape, q.dtype, q.device)
    check_tensor("pages", pages, (None,), torch.int32, q.device)
    rows, end = q.shape[0], start + q.shape[0]
    # keys that are not there would be left out of the sum
    if start < 0 or end > pages.shape[0] * PAGE:
        raise ValueError(
            f"pages must hold start + R = {start} + {rows} tokens, got {pages.shape[0]} pages of "
            f"{PAGE}"
        )
    table = pages[: (end + PAGE - 1) // PAGE]
    # [1, K, end, D]
    k, v = (_tokens(x, table)[:end].transpose(0, 1)[None] for x in (k_pages, v_pages))
    q, mask = q.transpose(0, 1)[None], None
    if _flash(q, k, v):
        # its causal mask ends where queries and keys do
        out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)[0]
        return out[0].transpose(0, 1)
    if start:
        # imports the compiler, over a second: not with csd, but with the first long prompt
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(rows, end)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=start == 0,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """True if flash attention is asked for by name: left to itself, PyTorch may take cuDNN's, which
    prepares for each length that is new to it."""
    if not q.is_cuda or q.shape[-1] % 8:
        return False
    return backend.can_use_flash_attention(backend.SDPAParams(q, k, v, None, 0.0, False, True))


def _tokens(cache: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """[tokens, K, D] of the pages in table. The table is read on the host on CPU only."""
    if cache.device.type == "cpu":
        ids = table.tolist()
        if ids == list(range(ids[0], ids[0] + len(ids))):
            return cache[ids[0] : ids[0] + len(ids)].flatten(0, 1)
    return cache.index_select(0, table).flatten(0, 1)
