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
    return tiles_for(*torch.cuda.get_device_capability(device))


def tiles_for(major: int, minor: int) -> str:
    """The target whose tiles run on a chip of this compute capability."""
    if major in (9, 10):
        return "sm_90"
    # other chips have less shared memory than either, and tiles made for 64 KiB fit them all
    return "sm_80" if (major, minor) in ((8, 0), (8, 7)) else "gfx942"


@cache
def programs_of(device: torch.device) -> int:
    """Programs of a fixed grid, in one wave; a few where they are interpreted.

    A multiprocessor runs two of those with sm_80's and sm_90's tiles, and one with the others'.
    """
    if device.type != "cuda":
        return 4
    each = 1 if target_of(device) == "gfx942" else 2
    return each * torch.cuda.get_device_properties(device).multi_processor_count
