"""Check for the compiler and headers that Triton's launchers need."""

import os
import shutil
import sysconfig

from csd.engine.self_check.report import Check

# packages by which most machines get both
HOW = "apt-get install gcc python3-dev"


def check_compiler() -> Check:
    """Check for a C compiler and Python's headers."""
    row = Check("C compiler and Python.h", calls=1)
    named = os.environ.get("CC")
    if not (shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang")):
        row.fail(f"Triton finds no C compiler{f' {named!r} (CC)' if named else ''}: {HOW}")
        return row
    headers = sysconfig.get_paths()["include"]
    if not os.path.exists(os.path.join(headers, "Python.h")):
        row.fail(f"there is no Python.h in {headers}: {HOW}")
    return row
