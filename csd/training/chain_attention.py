"""Attention of chains of drafted tokens, for all chains of a step at once.

A chain begins at a pair of its text. Its query sees the text's keys up to that pair, computed from
the target's states, and the chain's own keys, computed from guessed states. As a mask: a triangle,
and next to it one diagonal per step.
"""

import torch
from torch.utils.checkpoint import checkpoint

# queries whose scores are in memory at once
ROWS = 256


def chain_attention(
    q: torch.Tensor,  # [R, H, D], queries of chains, texts concatenated
    k: torch.Tensor,  # [P, K, D], keys of pairs
    v: torch.Tensor,  # [P, K, D]
    own_k: torch.Tensor,  # [J, R, K, D], keys of the chains' own tokens
    own_v: torch.Tensor,  # [J, R, K, D]
    spans: list[tuple[int, int, int]],  # per text: first pair, pair of the first chain, end
    scale: float,
) -> torch.Tensor:
    """softmax(scale q k^T) v [R, H, D]. The spans list the chains in the order of `q`.

    Only the scores of `ROWS` queries are in memory; they are recomputed for the gradients.
    """
    out, done = [], 0
    for first, begin, end in spans:
        for a in range(begin, end, ROWS):
            b = min(a + ROWS, end)
            rows = slice(done, done + b - a)
            part = q[rows], k[first:b], v[first:b], own_k[:, rows], own_v[:, rows], scale
            out.append(checkpoint(_mixed, *part, use_reentrant=False, preserve_rng_state=False))
            done = rows.stop
    return torch.cat(out)


def _mixed(
    q: torch.Tensor,  # [r, H, D]; the last row sees all of k
    k: torch.Tensor,  # [n, K, D]
    v: torch.Tensor,  # [n, K, D]
    own_k: torch.Tensor,  # [J, r, K, D]
    own_v: torch.Tensor,  # [J, r, K, D]
    scale: float,
) -> torch.Tensor:
    """Attention [r, H, D] of chains that begin at consecutive pairs."""
    n, kept = len(k), torch.promote_types(q.dtype, torch.float32)
    q = q.unflatten(1, (k.shape[1], -1))
    text = torch.einsum("rkgd,nkd->kgrn", q, k).to(kept)
    text = text.masked_fill(_later(len(q), n, q.device), -torch.inf)
    own = torch.einsum("rkgd,jrkd->kgrj", q, own_k).to(kept)
    p = (torch.cat([text, own], -1) * scale).softmax(-1).to(v.dtype)
    out = torch.einsum("kgrn,nkd->rkgd", p[..., :n], v)
    return (out + torch.einsum("kgrj,jrkd->rkgd", p[..., n:], own_v)).flatten(1, 2)


def _later(rows: int, keys: int, device: torch.device) -> torch.Tensor:
    """Mask [rows, keys], True for keys after the pair of each row; the last row has none."""
    return torch.ones(rows, keys, dtype=torch.bool, device=device).triu(keys - rows + 1)
