"""Compilation of all jobs of some targets, dtypes and shapes in separate processes."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import triton

from bench.gpu.aot.compile import compile_job
from bench.gpu.aot.record import jobs_of
from bench.lib.common import traced
from bench.lib.kernel_shape import Shape

ROOT = Path(__file__).parents[3]
BUFFER_OPERATIONS = "AMDGCN_USE_BUFFER_OPS"


def worker(path: str, part: int, parts: int) -> None:
    """Compile every `parts`-th job of the tasks at `path`; prints one JSON object per line."""
    with open(path) as file:
        tasks, without, disassembled = json.load(file)
    seen: set[tuple] = set()
    for target, dtype, sizes in tasks:
        for job in jobs_of(target, Shape(**sizes), dtype):
            name = f"{target} {sizes['name']} {job.name}"
            # a kernel that does not depend on the shape or the dtype is compiled once
            if (target, *job.key) in seen or (without and re.search(without, name)):
                continue
            seen.add((target, *job.key))
            if len(seen) % parts != part:
                continue
            row = {"shape": sizes["name"], "dtype": dtype}
            try:
                with _older_passes(target):
                    row |= compile_job(job, target, bool(re.search(disassembled, name)))
            except Exception as error:
                row |= {"kernel": job.name, "target": target, "error": _short(error)}
                row |= {"traceback": traced(error)}
            print(json.dumps(row), flush=True)


@contextmanager
def _older_passes(target: str) -> Iterator[None]:
    """For AMD's GPUs and Triton before 3.7, turn off passes that fail on the attention.

    They fail at a launch, too. Other targets keep the environment, which is part of the keys of
    Triton's cache: with another one, launches would find none of the binaries.
    """
    before = os.environ.get(BUFFER_OPERATIONS)
    older = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    if older and target.startswith("gfx"):
        os.environ[BUFFER_OPERATIONS] = "0"
    try:
        yield
    finally:
        os.environ.pop(BUFFER_OPERATIONS, None)
        if before is not None:
            os.environ[BUFFER_OPERATIONS] = before


def _short(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300]


def run(
    tasks: list[tuple[str, str, Shape]],
    processes: int = 2,
    cache: str | None = None,
    timeout: float | None = None,
    without: str = "",
    disassembled: str = "^sm_(90|80) ",
) -> list[dict]:
    """Rows of all tasks (target, dtype, shape), compiled in `processes` processes.

    cache: folder for the binaries, which launches with this TRITON_CACHE_DIR reuse; without one,
    they are compiled again and not kept. timeout: seconds after which the processes are killed, and
    OutOfTime is raised with the finished rows, in the order of the tasks. without, disassembled:
    regular expressions that are searched in "TARGET SHAPE KERNEL", for the kernels that are left
    out and for those whose rows have the counts from machine code.
    """
    late = []
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "tasks.json")
        with open(path, "w") as file:
            sizes = [(target, dtype, asdict(shape)) for target, dtype, shape in tasks]
            json.dump([sizes, without, disassembled], file)
        # Triton's interpreter and compiler cannot run in the same process
        env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache or folder}

        def part(i: int) -> list[dict]:
            code = f"from bench.gpu.aot.run import worker; worker({path!r}, {i}, {processes})"
            command = [sys.executable, "-c", code]
            try:
                done = subprocess.run(
                    command, cwd=ROOT, env=env, capture_output=True, timeout=timeout
                )
            except subprocess.TimeoutExpired as error:
                late.append(i)
                # the last line may be incomplete
                return _rows((error.stdout or b"").rpartition(b"\n")[0])
            if done.returncode:
                message = done.stderr.decode()[-2000:]
                raise RuntimeError(f"the compiling process failed:\n{message}")
            return _rows(done.stdout)

        with ThreadPoolExecutor(processes) as pool:
            parts = list(pool.map(part, range(processes)))
    rows = [row for rows in parts for row in rows]
    if late:
        raise OutOfTime(rows)
    return rows


class OutOfTime(Exception):
    """Raised when not all jobs were compiled in time; `rows` are those of the compiled ones."""

    def __init__(self, rows: list[dict]):
        super().__init__(f"{len(rows)} kernels were compiled in time")
        self.rows = rows


def _rows(lines: bytes) -> list[dict]:
    return [json.loads(line) for line in lines.splitlines()]


def problems(row: dict) -> list[str]:
    """Problems of a row: errors, too much shared memory, spills in bf16 on sm_90."""
    if "error" in row:
        return [row["error"]]
    faults = []
    if row["shared"] > row["limit"]:
        faults.append(f"shared memory {row['shared']} over {row['limit']}")
    # registers are spilled to the stack, so its size shows it where spills were not counted
    spills = row["stack"] or row["spills"] not in (0, "-")
    if row["target"] == "sm_90" and row["dtype"] == "bf16" and spills:
        faults.append(f"{row['spills']} spills, stack {row['stack']}")
    return faults


def table(rows: list[dict]) -> str:
    lines = [
        f"{'kernel':34} {'shape':13} {'dtype':5} {'target':7} {'warps':>5} {'stages':>6} "
        f"{'regs':>4} {'stack':>5} {'spills':>6} {'instr':>6} {'shared':>7} {'limit':>7} "
        f"{'mma':>5} {'once':>4} {'16 B':>5} {'1-2 B':>5} {'s':>6}"
    ]
    for r in rows:
        head = f"{r['kernel']:34} {r['shape']:13} {r['dtype']:5} {r['target']:7} "
        if "error" in r:
            lines.append(head + r["error"])
            continue
        lines.append(
            head + f"{r['warps']:5} {r['stages']:6} {r['registers']:4} {r['stack']:5} "
            f"{r['spills']:6} {r['instructions']:6} {r['shared']:7} {r['limit']:7} {r['mma']:>5} "
            f"{r['at once'] or '-':>4} {r['wide']:5} {r['narrow']:5} {r['seconds']:6.2f}"
            + "".join(f"  ! {p}" for p in problems(r))
        )
    return "\n".join(lines)
