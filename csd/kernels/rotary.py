"""Rotary position embedding of queries and keys, with the write of keys and values.

    rot(x)_j = x_j cos(p w_j) - x_{j + D/2} sin(p w_j)              j < D/2
               x_j cos(p w_{j - D/2}) + x_{j - D/2} sin(p w_{j - D/2})    j >= D/2

cos and sin come from tables [positions, D] computed in float32 and held in the model's dtype. (Su
et al., "RoFormer", 2021, in the half-split form that Llama checkpoints use.)
"""

import torch


def rotary_ref(
    q: torch.Tensor,  # [M, H, D]
    k: torch.Tensor,  # [M, K, D]
    v: torch.Tensor,  # [M, K, D]
    position: torch.Tensor,  # [M] int32
    cos: torch.Tensor,  # [positions, D]
    sin: torch.Tensor,  # [positions, D]
    node_k: torch.Tensor,  # [M, K, D], written
    node_v: torch.Tensor,  # [M, K, D], written
) -> torch.Tensor:
    """Returns the rotated queries [M, H, D]; rotated keys and values go to node_k and node_v."""
    index = position.long()
    cos, sin = cos[index][:, None], sin[index][:, None]
    node_k.copy_(k * cos + _rotate_half(k) * sin)
    node_v.copy_(v)
    return q * cos + _rotate_half(q) * sin


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


rotary = rotary_ref
