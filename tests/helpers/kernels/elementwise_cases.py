"""Random rows of a layer: for norm, rotary embedding and SwiGLU."""

import torch


def normal(*shape, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=g).to(dtype)


def rotary_case(M, H, K, D, dtype, fused=True, turned=None):
    """turned: numbers of a head that are, all by default."""
    qkv = normal(M, (H + 2 * K) * D, dtype=dtype)
    q, k, v = qkv.split((H * D, K * D, K * D), dim=-1)
    q, k, v = q.view(M, H, D), k.view(M, K, D), v.view(M, K, D)
    if not fused:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    position = torch.randint(50, (M,), generator=torch.Generator().manual_seed(M)).int()
    angle = torch.arange(50)[:, None] * torch.rand(
        turned or D, generator=torch.Generator().manual_seed(D)
    )
    node = torch.full((2, M, K, D), float("nan"), dtype=dtype)
    return dict(
        q=q,
        k=k,
        v=v,
        position=position,
        cos=angle.cos().to(dtype),
        sin=angle.sin().to(dtype),
        node_k=node[0],
        node_v=node[1],
    )
