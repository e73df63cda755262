"""Devices: that of an engine, a GPU that torch cannot use, and the name and number of the CPUs.

For an engine: the current device and stream of its launches, copies to the device, and memory.
CPUs that a process may use are those of its affinity, within the quota of its container.
"""

import math
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
# CUDA's words for a device in compute-exclusive mode that another process holds
BUSY = "busy or unavailable"
# files with the quota and the period of a control group, in microseconds of CPU time per period
CGROUP = Path("/sys/fs/cgroup")
CPU_QUOTA_V1 = "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """The caller's stream on `device`; a CPU has none."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def current(
    device: torch.device, stream: torch.cuda.Stream | None = None
) -> AbstractContextManager[Any]:
    """Make `device`, and `stream` if given, current within the block."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.device(device) if stream is None else torch.cuda.stream(stream)


def on_device(items: Iterable[T], device: torch.device) -> Iterator[T]:
    """Yield the items; `device` is current while they are computed, not while they are used.

    All are computed on the caller's stream at the first one.
    """
    stream = stream_of(device)
    yield from computed_in(lambda: current(device, stream), items)


def computed_in(
    context: Callable[[], AbstractContextManager[Any]], items: Iterable[T]
) -> Generator[T, None, None]:
    """Yield the items; each is computed, but not used, in a context of its own."""
    items = iter(items)
    try:
        while True:
            with context():
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            with context():
                close()


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to `device` without waiting for it."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def as_size(count: int) -> str:
    """A number of bytes as text."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def free_bytes(device: torch.device) -> int:
    """Free memory of `device`, in bytes."""
    if device.type == "cuda":
        # torch reuses the memory of freed tensors that it has reserved
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    return max(0, min(_available_bytes(), _address_space(), *_of_container()))


def _available_bytes() -> int:
    with suppress(OSError), open("/proc/meminfo") as f:
        for line in f:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _address_space() -> int:
    """Bytes that this process may still map (ulimit -v)."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return sys.maxsize
        with open("/proc/self/statm") as f:
            return limit - int(f.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    # Windows has no such limit
    except (ImportError, OSError):
        return sys.maxsize


# files of a container's limit and use of memory, in versions 2 and 1 of control groups
CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def _of_container() -> Iterator[int]:
    """Bytes that this process's container may still use; nothing without a limit."""
    for limit, used in CGROUPS:
        try:
            # "max" without a limit
            yield int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):
            continue


def peak_bytes(device: torch.device) -> int | None:
    """Peak bytes of torch on `device`, by `torch.cuda.max_memory_allocated`; None on a CPU.

    Since the process began, or since its user reset it.
    """
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


PROC = Path("/proc/driver/nvidia/version")
AMD = Path("/dev/kfd")
# variables with which a user hides GPUs
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
OLDER = "pip install torch --index-url https://download.pytorch.org/whl/cu126"


def unseen_gpu() -> str | None:
    """Advice on a GPU that torch cannot use; None if there is none or if it is hidden."""
    hidden = any(os.environ.get(name, "0").strip() in ("", "-1") for name in HIDING)
    if hidden or torch.cuda.is_available():
        return None
    driver = _driver()
    if driver is not None and "Enabled" in (_queried("mig.mode.current") or ""):
        return (
            "this machine has an NVIDIA GPU that is split into instances (MIG), but torch "
            f"{torch.__version__} sees none of them: `nvidia-smi -L` lists them; set "
            "CUDA_VISIBLE_DEVICES to the UUID of one"
        )
    if driver is not None:
        return (
            f"this machine has an NVIDIA GPU with driver {driver}, but torch {torch.__version__}, "
            f"built for CUDA {torch.version.cuda}, cannot use it. CUDA 13 needs driver 580 or "
            f"later; with an older driver: {OLDER}"
        )
    if AMD.exists():
        return (
            f"this machine has an AMD GPU ({AMD}), but torch {torch.__version__}, built for ROCm "
            f"{torch.version.hip}, cannot use it: install torch's build for ROCm "
            "(https://pytorch.org/get-started/locally), and check that you may open the device"
        )
    return None


@cache
def warn_of_unseen_gpu() -> None:
    """Warn once per process if torch cannot use this machine's GPU."""
    message = unseen_gpu()
    if message:
        warnings.warn(f"csd runs on the CPU: {message}", stacklevel=2)


def _driver() -> str | None:
    """The version of NVIDIA's driver, None without one."""
    try:
        words = PROC.read_text().split("\n")[0].split()
    except OSError:
        return _queried("driver_version")
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023
    return next((word for word in words if word[0].isdigit()), "unknown")


def _queried(field: str) -> str | None:
    """A field of the first GPU, from nvidia-smi; None without one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    asked = [program, f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # a machine may have the program and no GPU
    lines = done.stdout.split("\n")
    return lines[0].strip() or None if done.returncode == 0 else None


CPUINFO = Path("/proc/cpuinfo")


def cpu_name() -> str:
    """The first core's model, as reported by the system."""
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    return model(text) or platform.processor() or platform.machine()


def model(cpuinfo: str) -> str | None:
    """Name of the first core; for an ARM core, numbers of implementer and part."""
    if match := re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.M):
        return match[1].strip()
    names = "implementer", "part"
    numbers = (re.search(rf"^CPU ({name})\s*:\s*(\S+)$", cpuinfo, re.M) for name in names)
    return " ".join(f"{x[1]} {x[2]}" for x in numbers if x) or None


# instruction sets that select the code of a kernel, as Linux names them: x86, then ARM
SETS = (
    *("avx2", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"),
    *("avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "svebf16"),
)


def instructions(cpuinfo: str | None = None) -> list[str]:
    """Instruction sets of `SETS` that the first core has; none where the system lists no sets.

    cpuinfo: text of /proc/cpuinfo, by default this machine's.
    """
    if cpuinfo is None:
        cpuinfo = CPUINFO.read_text() if CPUINFO.exists() else ""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.M)
    have = set(flags[1].split()) if flags else set()
    return [name for name in SETS if name in have]


def is_out_of_memory(error: BaseException) -> bool:
    """True for an error of an allocation, which torch raises as a RuntimeError on a CPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)
    )


def usable_cpus() -> int:
    """CPUs that this process may use at once, at least 1.

    A container's quota is less than one CPU for each of its cores. PyTorch does not read it.
    """
    try:
        cpus = len(os.sched_getaffinity(0))
    # macOS and Windows have no affinity
    except AttributeError:
        cpus = os.cpu_count() or 1
    quota = group_quota(CGROUP)
    return cpus if quota is None else max(1, min(cpus, math.ceil(quota)))


def group_quota(group: Path) -> float | None:
    """CPUs of a control group's quota; None without a quota, or without control groups."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((group / name).read_text().strip() for name in CPU_QUOTA_V1)
        except OSError:
            return None
    try:
        # "max", or -1, is no quota
        cpus = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return cpus if cpus > 0 else None
