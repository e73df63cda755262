"""Checks of what Triton needs of a machine beside a GPU, in words that say how to get it."""

import os
import shutil
import sysconfig
import tempfile
from pathlib import Path

import torch
from triton import knobs

from csd.engine.self_check.report import Check

# packages by which most machines get both
HOW = "apt-get install gcc python3-dev"


def check_machine() -> list[Check]:
    return [check_compiler(), check_folder()]


def check_compiler() -> Check:
    """Check for the C compiler and Python's headers of Triton's launchers."""
    row = Check("C compiler and Python.h", calls=1)
    named = os.environ.get("CC")
    if not (shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang")):
        row.fail(f"Triton finds no C compiler{f' {named!r} (CC)' if named else ''}: {HOW}")
        return row
    headers = sysconfig.get_paths()["include"]
    if not os.path.exists(os.path.join(headers, "Python.h")):
        row.fail(f"there is no Python.h in {headers}: {HOW}")
    return row


def check_folder() -> Check:
    """Check that Triton can keep what it compiles, without which it launches nothing."""
    row = Check("folder of compiled kernels", calls=1)
    try:
        folder = Path(knobs.cache.dir)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    # a user may have no home
    except (OSError, RuntimeError) as error:
        row.fail(
            f"Triton cannot write what it compiles ({error}): set TRITON_CACHE_DIR to a folder "
            "that you may write to, and XDG_CACHE_HOME to one for what csd keeps"
        )
    return row


def instance_note(device: torch.device) -> str | None:
    """A note on a device that is a part of a GPU (MIG), the part that is timed; else None."""
    if device.type != "cuda" or "MIG" not in torch.cuda.get_device_name(device):
        return None
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return (
        f"{device} is an instance of a GPU (MIG) with {count} multiprocessors: grids and step "
        "times are made for these"
    )
