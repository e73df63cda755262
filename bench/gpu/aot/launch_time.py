"""The host's time for a launch, with pointers and constants as arguments or as two tuples.

python -m bench launch_time [--json F]

The JIT's own path from the call to the compiled kernel, which needs no device: binding,
specialisation and the lookup of what was compiled. The driver's launch, which is not timed, unpacks
as many pointers either way. Microseconds of CPU time, the least of alternated rounds.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from collections import namedtuple
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from bench.lib.common import finish, write

# pointers, sizes that are not specialised, and constants
SIZES = (5, 2, 4), (8, 4, 8), (20, 4, 20), (45, 7, 24)
ROUNDS, CALLS = 20, 300
SOURCE = """
import triton
import triton.language as tl

@triton.jit(do_not_specialize={sizes})
def flat({pointers}, {plain}, {constants}):
    tl.store(p0, n0 + C0)

@triton.jit(do_not_specialize={sizes})
def tuples(record, {plain}, C: tl.constexpr):
    tl.store(record.p0, n0 + C.C0)

def launch_flat(x):
    flat[(1,)]({passed}, {given}, {values}, num_warps=4)

def launch_tuples(x):
    tuples[(1,)](record=VIEW(x), {given}, C=Constants({values}), num_warps=4)
"""


class _Compiled(dict):
    """Stands for all kernels that were compiled; a launch ends at the driver."""

    def get(self, key: object, default: object = None) -> object:
        nothing: Callable = lambda *args: None  # noqa: E731
        return SimpleNamespace(function=0, packed_metadata=(), launch_metadata=nothing, run=nothing)


def launches(pointers: int, sizes: int, constants: int) -> tuple[Callable, Callable]:
    """Two functions that launch a kernel with so many arguments, flat and in tuples."""
    names, plain = [f"p{i}" for i in range(pointers)], [f"n{i}" for i in range(sizes)]
    fixed = [f"C{i}" for i in range(constants)]
    text = SOURCE.format(
        sizes=plain,
        pointers=", ".join(names),
        plain=", ".join(plain),
        constants=", ".join(f"{c}: tl.constexpr" for c in fixed),
        passed=", ".join(f"{n}=x.{n}" for n in names),
        given=", ".join(f"{n}=7" for n in plain),
        values=", ".join(f"{c}={i}" for i, c in enumerate(fixed)),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"launched_{pointers}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    kind, get = namedtuple("View", names), attrgetter(*names)
    module.VIEW, module.Constants = (lambda x: kind._make(get(x))), namedtuple("Constants", fixed)
    for kernel in (module.flat, module.tuples):
        kernel.device_caches[0] = (_Compiled(), *kernel.device_caches[0][1:])
    record = SimpleNamespace(**{n: torch.empty(64, dtype=torch.int32) for n in names})
    return (lambda: module.launch_flat(record)), (lambda: module.launch_tuples(record))


def least(calls: tuple[Callable, ...]) -> list[float]:
    """Least microseconds of CPU time of a call, over alternated rounds."""
    times = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for i, call in enumerate(calls):
            start = time.process_time()
            for _ in range(CALLS):
                call()
            times[i] = min(times[i], (time.process_time() - start) / CALLS * 1e6)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
        )
    )
    rows = []
    for pointers, sizes, constants in SIZES:
        flat, tuples = least(launches(pointers, sizes, constants))
        row = dict(pointers=pointers, sizes=sizes, constants=constants)
        rows.append(row | dict(flat_us=round(flat, 1), tuples_us=round(tuples, 1)))
        print(rows[-1])
    result = {"triton": triton.__version__, "rows": rows}
    write(result, args.json, indent=1)
    finish(result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
