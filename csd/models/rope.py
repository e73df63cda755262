"""Tables of cosines and sines for rotary embedding.

w_j = theta^(-2 j / D);   llama3 divides low frequencies by a factor and blends in between,
and yarn also multiplies cosines and sines by a constant
"""

import math

import torch

from csd.models.config import ModelConfig


def rope_tables(
    config: ModelConfig,
    positions: int,
    dtype: torch.dtype,
    device: str | torch.device,
    frequencies: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [positions, D]: computed in float32 as transformers does, then cast."""
    angle = torch.arange(positions, dtype=torch.float32, device=device)[:, None]
    w = _frequencies(config) if frequencies is None else frequencies
    angle = angle * w.to(device, torch.float32)
    angle = torch.cat((angle, angle), dim=-1)
    cos, sin = angle.cos() * config.rope_attention, angle.sin() * config.rope_attention
    return cos.to(dtype), sin.to(dtype)


def _frequencies(config: ModelConfig) -> torch.Tensor:
    if config.rope_type != "default":
        raise ValueError(f"rope type {config.rope_type!r} needs frequencies, those of a module")
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    w = 1.0 / (config.rope_theta**exponent)
    if config.rope_scaling is None:
        return w
    factor, low, high, old_context = config.rope_scaling
    wavelength = 2 * math.pi / w
    # 1 above the high frequency bound, 0 below the low one
    blend = ((old_context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * w / factor + blend * w
