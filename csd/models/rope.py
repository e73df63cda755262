"""Tables of cosines and sines for rotary embedding.

w_j = theta^(-2 j / R);   llama3 divides low frequencies by a factor and blends in between,
and yarn also multiplies cosines and sines by a constant
"""

import math

import torch

from csd.models.rope_config import Rope


def rope_tables(
    rope: Rope,
    dims: int,  # R
    positions: int,
    dtype: torch.dtype,
    device: str | torch.device,
    frequencies: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [positions, R]: computed in float32 as transformers does, then cast."""
    angle = torch.arange(positions, dtype=torch.float32, device=device)[:, None]
    w = _frequencies(rope, dims) if frequencies is None else frequencies
    angle = angle * w.to(device, torch.float32)
    angle = torch.cat((angle, angle), dim=-1)
    cos, sin = angle.cos() * rope.attention, angle.sin() * rope.attention
    return cos.to(dtype), sin.to(dtype)


def _frequencies(rope: Rope, dims: int) -> torch.Tensor:
    if rope.kind != "default":
        raise ValueError(f"rope type {rope.kind!r} needs the frequencies of a module")
    exponent = torch.arange(0, dims, 2, dtype=torch.float32) / dims
    w = 1.0 / (rope.theta**exponent)
    if rope.scaling is None:
        return w
    factor, low, high, old_context = rope.scaling
    wavelength = 2 * math.pi / w
    # 1 above the high frequency bound, 0 below the low one
    blend = ((old_context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * w / factor + blend * w
