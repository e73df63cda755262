"""The chip that kernels are launched on, as far as tiles and grids depend on it."""

from functools import cache

import torch


@cache
def target_of(device: torch.device) -> str:
    """The target whose tiles a device runs; CPU tensors are interpreted and take sm_90's."""
    if device.type != "cuda":
        return "sm_90"
    if torch.version.hip:
        return "gfx942"
    major, _ = capability = torch.cuda.get_device_capability(device)
    if major in (9, 10):
        return "sm_90"
    # other chips have less shared memory than either, and tiles made for 64 KiB fit them all
    return "sm_80" if capability in ((8, 0), (8, 7)) else "gfx942"


@cache
def programs_of(device: torch.device) -> int:
    """Programs of a fixed grid: two for each multiprocessor; a few where they are interpreted."""
    if device.type != "cuda":
        return 4
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count
