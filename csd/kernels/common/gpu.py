"""Properties of a GPU by which launchers choose tiles and grids; programmatic dependent launch.

With dependent launch a kernel starts while the previous one is still running: from sm_90 on, as
soon as every program of its predecessor has called `launch_next` or ended. It may read the
predecessor's results, and write anything, only after `wait_for_previous`, which waits until all of
the results are in memory. Weights do not depend on the predecessor: `prefetch` requests them before
the wait. It moves them to the L2 cache and not to registers, so weights that an optimiser's kernel
has just written are not read too early. (CUDA C++ Programming Guide, "Programmatic Dependent Launch
and Synchronization".)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

KIB = 1024
# KiB of shared memory that a program may use, by target (CUDA C++ Programming Guide, "Compute
# Capabilities"; AMD's LDS), and of chips that are not listed
SHARED = {
    "sm_75": 64,
    "sm_80": 163,
    "sm_86": 99,
    "sm_87": 163,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "sm_103": 227,
    "sm_110": 227,
    "sm_120": 99,
    "sm_121": 99,
    "gfx942": 64,
}
LEAST = 64
# compute capability of NVIDIA's GPUs from which they have bfloat16 arithmetic
BFLOAT16_SINCE = (8, 0)


@dataclass(frozen=True, slots=True)
class Chip:
    """A GPU. name: the compiler's target. shared: bytes of shared memory that a program may use."""

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
        """True if tensor cores read their operands from shared memory, not from registers.

        Then a loop of n stages holds n copies of its loads in shared memory, else n - 1.
        """
        return not self.is_amd and self.shared >= 227 * KIB

    @property
    def half(self) -> int:
        """Bytes of shared memory for each of two programs on a multiprocessor.

        A multiprocessor has 1 KiB more than one program may use, and each program reserves 1 KiB.
        """
        return (self.shared + KIB) // 2 - KIB


_launching_for: Chip | None = None


@contextmanager
def launching_for(chip: Chip) -> Iterator[None]:
    """Context in which every device has this chip, for launches that are recorded and not run."""
    global _launching_for
    before, _launching_for = _launching_for, chip
    try:
        yield
    finally:
        _launching_for = before


def chip_of(device: torch.device) -> Chip:
    """The chip of a device; sm_90 for CPU tensors, whose kernels are interpreted."""
    return _launching_for or _chip_of(device)


@cache
def _chip_of(device: torch.device) -> Chip:
    if device.type != "cuda":
        return Chip.of("sm_90")
    if torch.version.hip:
        return Chip.of("gfx942")
    major, minor = torch.cuda.get_device_capability(device)
    return Chip.of(f"sm_{10 * major + minor}")


def has_bfloat16(device: torch.device) -> bool:
    """False for NVIDIA's GPUs without bfloat16 arithmetic, True for every other device."""
    if device.type != "cuda" or torch.version.hip:
        return True
    return torch.cuda.get_device_capability(device) >= BFLOAT16_SINCE


@cache
def programs_of(device: torch.device) -> int:
    """Number of programs of a fixed grid that run in one wave; a few if they are interpreted.

    With the chosen tiles a multiprocessor runs two programs, on AMD one.
    """
    if device.type != "cuda":
        return 4
    each = 1 if chip_of(device).is_amd else 2
    return each * torch.cuda.get_device_properties(device).multi_processor_count


def dependent_options(kernel: Any) -> dict[str, Any]:
    """Returns the constant PDL and the launch option of a kernel that has this constant."""
    on = has_dependent_launch(kernel)
    return {"PDL": True, "launch_pdl": True} if on else {"PDL": False}


def has_dependent_launch(kernel: Any) -> bool:
    """True if the current GPU has programmatic dependent launch; False for the interpreter."""

    import triton

    if not isinstance(kernel, triton.JITFunction):
        return False
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and int(target.arch) >= 90
