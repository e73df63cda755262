"""Name of this machine's CPU."""

import platform
import re
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def cpu_name() -> str:
    """The first core's model, as reported by the system."""
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    return model(text) or platform.processor() or platform.machine()


def model(cpuinfo: str) -> str | None:
    """Name of the first core; for an ARM core, numbers of implementer and part."""
    if found := re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.M):
        return found[1].strip()
    numbers = [re.search(rf"^CPU {n}\s*:\s*(\S+)$", cpuinfo, re.M) for n in ("implementer", "part")]
    return " ".join(f"{n} {x[1]}" for n, x in zip(("implementer", "part"), numbers, strict=True)
                    if x) or None  # fmt: skip
