"""Engines of a tiny random model with the same weights on every device, also a simulated one."""

import torch

import csd
from bench.lib.shapes import converted, random_model


def model(device, dtype=torch.float32):
    """Weights are drawn on the CPU: from one seed, a GPU's generator draws other numbers."""
    # with its index, which a build of torch without CUDA cannot look up
    device = torch.empty(0, device=device).device
    return converted(random_model("tiny", "cpu", dtype), lambda x: x.to(device))


def engine(device, dtype=torch.float32, **options):
    return csd.Engine(model(device, dtype), **dict(max_slots=4, self_check=False) | options)
