"""x W^T + b, as fast for the few rows of a decoding step as the machine allows."""

import torch
import torch.nn.functional as F

# not every build of PyTorch has it, and the flag is on without it too
ONEDNN = torch.backends.mkldnn.is_available()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x: [M, in], weight: [out, in], bias: [out]. Returns [M, out].

    On a CPU, `F.linear` in float32 is MKL's matrix product, where PyTorch has it, and slow for a
    few rows; oneDNN's is not. `python -m bench.step_times` has both.
    """
    here = x.device.type == "cpu" and x.dtype == torch.float32
    if here and ONEDNN and torch.backends.mkldnn.enabled:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)
