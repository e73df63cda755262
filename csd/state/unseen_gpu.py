"""Detection of a GPU that torch cannot use."""

import os
import shutil
import subprocess
import warnings
from functools import cache
from pathlib import Path

import torch

PROC = Path("/proc/driver/nvidia/version")
AMD = Path("/dev/kfd")
# variables with which a user hides GPUs
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
OLDER = "pip install torch --index-url https://download.pytorch.org/whl/cu126"


def unseen_gpu() -> str | None:
    """Advice on a GPU that torch cannot use; None if there is none or if it is hidden."""
    if torch.cuda.is_available() or any(_hides(os.environ.get(name)) for name in HIDING):
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
    found = unseen_gpu()
    if found:
        warnings.warn(f"csd runs on the CPU: {found}", stacklevel=2)


def _hides(devices: str | None) -> bool:
    return devices is not None and devices.strip() in ("", "-1")


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
