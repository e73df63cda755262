"""RMS norm of the sum of a layer's output and the residual stream.

    r = x + residual,    y = weight * ( r / sqrt(mean(r^2) + eps) )

The statistics and the division are in float32 whatever the dtype, then y is cast back before the
weight is applied: transformers' order of casts, which its logits depend on. (Zhang and Sennrich,
"Root mean square layer normalization", 2019.)
"""

import torch


def rms_norm_ref(
    x: torch.Tensor,  # [.., F]
    weight: torch.Tensor,  # [F]
    eps: float,
    residual: torch.Tensor | None = None,  # [.., F]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (y, r), both [.., F] in x's dtype; r is x itself without a residual."""
    r = x if residual is None else x + residual
    wide = r.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype), r


rms_norm = rms_norm_ref
