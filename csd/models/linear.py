"""x W^T + b, as fast for the few rows of a decoding step as the machine allows."""

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x: [M, in], weight: [out, in], bias: [out]. Returns [M, out].

    On a CPU, `F.linear` in float32 is MKL's matrix product. It packs the whole weight anew in each
    call, which for 2 to 16 rows costs more than the product; oneDNN reads it as it lies.
    """
    if x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.enabled:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)
