"""Gated activation of the feed-forward layer.

    y = silu(gate) * up,    silu(x) = x / (1 + exp(-x))

gate and up are the two halves of one row, as one matrix product gives them. (Shazeer, "GLU
variants improve transformer", 2020.)
"""

import torch
import torch.nn.functional as F


def swiglu_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [.., 2F]. Returns [.., F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


swiglu = swiglu_ref
