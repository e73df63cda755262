"""Checks of Triton's requirements other than a GPU, with messages on how to install them."""

import os
import shutil
import sysconfig
import tempfile
from pathlib import Path

import torch
from triton import knobs

from csd.engine.self_check.report import Check

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
