"""The chip that kernels are launched on, as far as tiles and grids depend on it."""

from dataclasses import dataclass
from functools import cache

import torch

KIB = 1024
# KiB of shared memory that a program may use, by target (CUDA C++ Programming Guide, "Compute
# Capabilities"; AMD's LDS), and of chips that are not listed
SHARED = {
    "sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227,
    "sm_103": 227, "sm_110": 227, "sm_120": 99, "sm_121": 99, "gfx942": 64,
}  # fmt: skip
LEAST = 64


@dataclass(frozen=True, slots=True)
class Chip:
    """name: among compilers' targets. shared: bytes of shared memory that a program may use."""

    name: str
    shared: int

    @classmethod
    def of(cls, name: str) -> "Chip":
        return cls(name, SHARED.get(name, LEAST) * KIB)

    @property
    def is_amd(self) -> bool:
        return self.name.startswith("gfx")

    @property
    def reads_shared(self) -> bool:
        """True if tensor cores read their operands from shared memory, and no registers.

        Then a loop of n stages has n copies of what it loads in shared memory, else n - 1.
        """
        return not self.is_amd and self.shared >= 227 * KIB

    @property
    def half(self) -> int:
        """Bytes for each of two programs of a multiprocessor, which has 1 KiB more than one may
        use, and of which each takes 1 KiB."""
        return (self.shared + KIB) // 2 - KIB


@cache
def chip_of(device: torch.device) -> Chip:
    """The chip of a device; CPU tensors are interpreted and take sm_90's tiles."""
    if device.type != "cuda":
        return Chip.of("sm_90")
    if torch.version.hip:
        return Chip.of("gfx942")
    major, minor = torch.cuda.get_device_capability(device)
    return Chip.of(f"sm_{10 * major + minor}")


@cache
def programs_of(device: torch.device) -> int:
    """Programs of a fixed grid, in one wave; a few where they are interpreted.

    Tiles are made such that a multiprocessor runs two; of AMD's one.
    """
    if device.type != "cuda":
        return 4
    each = 1 if chip_of(device).is_amd else 2
    return each * torch.cuda.get_device_properties(device).multi_processor_count
