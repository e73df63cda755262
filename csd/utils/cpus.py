"""Number of CPUs that this process may use: its affinity, and the quota of its container."""

import math
import os
from pathlib import Path

# files with the quota and the period of a control group, in microseconds of CPU time per period
GROUP = Path("/sys/fs/cgroup")
FIRST_VERSION = "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"


def usable_cpus() -> int:
    """CPUs that this process may use at once, at least 1.

    A container's quota is less than one CPU for each of its cores. PyTorch does not read it.
    """
    try:
        cpus = len(os.sched_getaffinity(0))
    # macOS and Windows have no affinity
    except AttributeError:
        cpus = os.cpu_count() or 1
    quota = group_quota(GROUP)
    return cpus if quota is None else max(1, min(cpus, math.ceil(quota)))


def group_quota(group: Path) -> float | None:
    """CPUs of a control group's quota; None without a quota, or without control groups."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((group / name).read_text().strip() for name in FIRST_VERSION)
        except OSError:
            return None
    try:
        # "max", or -1, is no quota
        cpus = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return cpus if cpus > 0 else None
