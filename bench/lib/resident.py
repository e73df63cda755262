"""Resident set of this process, on Linux."""

from pathlib import Path


def resident(peak: bool = False) -> int:
    """Bytes of the resident set, or its peak since `reset_peak`."""
    name = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) << 10 for x in lines if x.startswith(name))


def reset_peak() -> None:
    """Set the peak to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
