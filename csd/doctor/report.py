"""Checks and their report, a table; and checks of what Triton needs beside a GPU."""

import logging
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from csd.kernels.common.operator import has_triton
from csd.utils.phases import is_shown
from csd.utils.version import __version__

LOG = logging.getLogger("csd")
# states of checks that were printed
_printed: "WeakKeyDictionary[Check, str]" = WeakKeyDictionary()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Check:
    """One operation, one part of its work, or one comparison of whole generations."""

    name: str
    calls: int = 0
    error: str | None = None  # the first error
    worst: float = 0.0  # largest error of a float, as a share of the allowed error

    @property
    def passed(self) -> bool:
        return self.error is None and self.calls > 0

    def show(self) -> None:
        """Print a line when the first call has been compared, and when the first error is found."""
        state = "FAILED" if self.error else "ok"
        if is_shown() and _printed.get(self) not in (state, "FAILED"):
            _printed[self] = state
            print(f"csd: {self.name}: {state}", file=sys.stderr, flush=True)

    def fail(self, error: str | Exception) -> None:
        """Record the first error, with the kernel's name if a launch raised it."""
        if self.error is None:
            self.error = error if isinstance(error, str) else described(error)
            if isinstance(error, Exception):
                LOG.info("%s failed", self.name, exc_info=error)


@dataclass(slots=True)
class Report:
    """Results of all checks, with the device and the versions."""

    device: str
    dtype: str
    kernels: str
    versions: dict[str, str]
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # remarks that are not errors
    seconds: float = 0.0

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    def table(self) -> str:
        head = [f"{name} {version}" for name, version in self.versions.items()]
        lines = [", ".join(head), f"{self.device}, {self.dtype}, kernels={self.kernels!r}", ""]
        for check in self.checks:
            state = "ok" if check.passed else "FAILED"
            row = f"{check.name:40} {check.calls:5} calls  {state:6}  error {check.worst:.2f}"
            lines.append(row + (f"  {check.error}" if check.error else ""))
        lines += self.notes
        lines.append(
            f"{len(self.checks) - len(self.failed)} of {len(self.checks)} passed in "
            f"{self.seconds:.1f} s; errors are relative to the allowed error"
        )
        return "\n".join(lines)


def described(error: Exception) -> str:
    """First 200 characters of an error, after the name of the kernel whose launch raised it."""
    text, trace, kernel = f"{type(error).__name__}: {error}"[:200], error.__traceback__, None
    if not has_triton():
        return text
    from triton.runtime import KernelInterface

    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, KernelInterface):
            kernel = getattr(getattr(owner, "fn", None), "__name__", None) or kernel
        trace = trace.tb_next
    return f"{kernel}: {text}" if kernel else text


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU"


def versions(device: torch.device) -> dict[str, str]:
    numbers = {"csd": __version__, "torch": torch.__version__, "triton": "none"}
    if has_triton():
        import triton

        numbers["triton"] = triton.__version__
    if device.type == "cuda":
        numbers["CUDA"] = torch.version.cuda or "none"
        numbers["driver"] = str(getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")())
    return numbers


# command that installs both on most machines
HOW = "apt-get install gcc python3-dev"


def check_machine() -> list[Check]:
    return [check_compiler(), check_folder()]


def check_compiler() -> Check:
    """Check for the C compiler and the Python headers that Triton's launchers need."""
    row = Check("C compiler and Python.h", calls=1)
    named = os.environ.get("CC")
    if not (shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang")):
        row.fail(f"Triton finds no C compiler{f' {named!r} (CC)' if named else ''}: {HOW}")
        return row
    # as Triton does: Debian's scheme "posix_local" has no headers
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    headers = sysconfig.get_paths(scheme=scheme)["include"]
    if not os.path.exists(os.path.join(headers, "Python.h")):
        row.fail(f"Python.h is missing in {headers}: {HOW}")
    return row


def check_folder() -> Check:
    """Check that Triton can write compiled kernels to its cache, without which it cannot launch."""
    from triton import knobs

    row = Check("folder of compiled kernels", calls=1)
    try:
        folder = Path(knobs.cache.dir)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    # a user may have no home
    except (OSError, RuntimeError) as error:
        row.fail(
            f"Triton cannot write its compiled kernels ({error}): set TRITON_CACHE_DIR to a "
            "writable folder, and XDG_CACHE_HOME to one for csd's caches"
        )
    return row


def instance_note(device: torch.device) -> str | None:
    """A note if the device is a MIG instance, since timings are of that part only; else None."""
    if device.type != "cuda" or "MIG" not in torch.cuda.get_device_name(device):
        return None
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return (
        f"{device} is an instance of a GPU (MIG) with {count} multiprocessors: grid sizes and "
        "step times apply to this instance"
    )
