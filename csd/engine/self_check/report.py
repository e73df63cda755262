"""Rows of a check, and the report that prints them as a table."""

import logging
import platform
from dataclasses import dataclass, field

import torch
import triton
from triton.runtime import KernelInterface

from csd.state.version import __version__

LOG = logging.getLogger("csd")


@dataclass(slots=True)
class Check:
    """One operation, one part of its work, or one comparison of whole generations."""

    name: str
    calls: int = 0
    error: str | None = None  # the first error
    worst: float = 0.0  # largest error of a float, as a share of the allowed error

    @property
    def passed(self) -> bool:
        return self.error is None and self.calls > 0

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
        lines.append(f"{len(self.checks) - len(self.failed)} of {len(self.checks)} passed in "
                     f"{self.seconds:.1f} s; errors are relative to the allowed error")  # fmt: skip
        return "\n".join(lines)

    def raise_failed(self) -> None:
        """Raise RuntimeError naming the first failed check, and a workaround."""
        if self.failed:
            first = self.failed[0]
            raise RuntimeError(
                f"csd's check of {first.name} failed on {self.device}: {first.error}. No sample "
                "was drawn. Engine(..., kernels='reference') runs without Triton; please report "
                "the output of `csd doctor`"
            )


def described(error: Exception) -> str:
    """First 200 characters of an error, after the name of the kernel whose launch raised it."""
    text, trace = f"{type(error).__name__}: {error}"[:200], error.__traceback__
    kernel = None
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
    found = {"csd": __version__, "torch": torch.__version__, "triton": triton.__version__}
    if device.type == "cuda":
        found["CUDA"] = torch.version.cuda or "none"
        found["driver"] = str(getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")())
    return found
