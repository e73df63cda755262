"""Attention of chains of drafted tokens, all chains of a step at once.

A chain begins at a pair of its text. Its token's query sees the keys of the text up to that pair,
which are of the target's states, and the chain's own keys, of guessed ones: in a matrix, a
triangle beside one diagonal for each step.
"""

import torch
from torch.utils.checkpoint import checkpoint

# queries whose scores are in memory at once
ROWS = 256


def chain_attention(
    q: torch.Tensor,  # [R, H, D], of chains, texts one behind the other
    k: torch.Tensor,  # [P, K, D], of pairs
    v: torch.Tensor,  # [P, K, D]
    own_k: torch.Tensor,  # [J, R, K, D], of the chains' own tokens
    own_v: torch.Tensor,  # [J, R, K, D]
    spans: list[tuple[int, int, int]],  # of texts: the first pair, the first chain's pair, the end
    scale: float,
) -> torch.Tensor:
    """softmax(scale q k^T) v [R, H, D]. The spans' chains are those of `q`, in its order.

    Scores of `ROWS` queries are in memory, and are computed again for their gradients.
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
    q: torch.Tensor,  # [r, H, D], whose last row has all of k
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
    """Keys [rows, keys] behind the pair of each row, True; the last row has none."""
    return torch.ones(rows, keys, dtype=torch.bool, device=device).triu(keys - rows + 1)
