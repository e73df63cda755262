"""Compile every kernel for GPUs that are not there, and show what each of them uses.

python -m bench.aot --json F [--targets sm_90 ..] [--dtypes bf16 ..] [--shapes smollm2-135m ..]

One row a specialisation: registers, stack, spills, shared memory against the target's limit, loads
from global memory of 16 bytes and of one or two, seconds. The exit status is 1 when one does not
compile, does not fit, or spills in bf16 on sm_90.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from csd.kernels.aot import TARGETS, Shape, all_jobs, compile_job
from csd.models import shapes

# the two that are benchmarked on a GPU come first
SHAPES = tuple(
    Shape.of(name, shapes.SHAPES[name]) for name in ("llama-3.1-8b", "qwen2.5-7b", "smollm2-135m")
)
# head sizes of models that are not benchmarked
OTHER_SHAPES = (
    Shape("head-96", 32, 32, 96, 3072, 8192, 32, 32064),
    Shape("head-256", 16, 8, 256, 3584, 14336, 42, 256000),
)


def worker(path: str, part: int, parts: int) -> None:
    """Compiles every `parts`-th task of the file at `path`; one JSON object a line."""
    with open(path) as file:
        tasks = json.load(file)
    seen: dict[tuple, str] = {}
    index = 0
    for target, dtype, sizes in tasks:
        name = sizes["name"]
        for job in all_jobs(target, Shape(**sizes), dtype):
            # a kernel that does not depend on the shape is compiled once
            key = (target, job.kernel.__name__, repr(sorted(job.args.items())), job.num_warps)
            if seen.setdefault(key, name) != name:
                continue
            index += 1
            if index % parts != part:
                continue
            row = {"shape": name, "dtype": dtype}
            try:
                row |= compile_job(job, target)
            except Exception as error:
                row |= {"kernel": job.name, "target": target, "error": _short(error)}
            print(json.dumps(row), flush=True)


def _short(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300]


def run(
    tasks: list[tuple[str, str, Shape]],
    processes: int = 2,
    cache: str | None = None,
    timeout: float | None = None,
) -> list[dict]:
    """Rows of all tasks (target, dtype, shape), compiled in `processes` processes.

    cache: the folder for the binaries, where launches with this TRITON_CACHE_DIR find them; without
    one they are compiled afresh and not kept. timeout: seconds after which the processes are ended,
    and subprocess.TimeoutExpired is raised.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "tasks.json")
        with open(path, "w") as file:
            json.dump([(target, dtype, asdict(shape)) for target, dtype, shape in tasks], file)
        # the interpreter cannot share a process with the compiler
        env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache or folder}

        def part(i: int) -> list[dict]:
            code = f"from bench.aot import worker; worker({path!r}, {i}, {processes})"
            done = subprocess.run(
                [sys.executable, "-c", code],
                cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
                env=env,
                capture_output=True,
                text=True,
                timeout=timeout,
            )
            if done.returncode:
                raise RuntimeError(f"the compiling process failed:\n{done.stderr[-2000:]}")
            return [json.loads(line) for line in done.stdout.splitlines()]

        with ThreadPoolExecutor(processes) as pool:
            parts = list(pool.map(part, range(processes)))
    return [row for rows in parts for row in rows]


def problems(row: dict) -> list[str]:
    """What is wrong with a row."""
    if "error" in row:
        return [row["error"]]
    found = []
    if row["shared"] > row["limit"]:
        found.append(f"shared memory {row['shared']} over {row['limit']}")
    if row["target"] == "sm_90" and row["dtype"] == "bf16" and (row["spills"] or row["stack"]):
        found.append(f"{row['spills']} spills, stack {row['stack']}")
    return found


def table(rows: list[dict]) -> str:
    lines = [
        f"{'kernel':34} {'shape':13} {'dtype':5} {'target':7} {'warps':>5} {'stages':>6} "
        f"{'regs':>4} {'stack':>5} {'spills':>6} {'shared':>7} {'limit':>7} {'mma':>5} {'16 B':>5} "
        f"{'1-2 B':>5} {'s':>6}"
    ]
    for r in rows:
        head = f"{r['kernel']:34} {r['shape']:13} {r['dtype']:5} {r['target']:7} "
        if "error" in r:
            lines.append(head + r["error"])
            continue
        lines.append(
            head + f"{r['warps']:5} {r['stages']:6} {r['registers']:4} {r['stack']:5} "
            f"{r['spills']:6} {r['shared']:7} {r['limit']:7} {r['mma']:>5} "
            f"{r['wide']:5} {r['narrow']:5} {r['seconds']:6.2f}"
            + "".join(f"  ! {p}" for p in problems(r))
        )
    return "\n".join(lines)


def main() -> int:
    named = {s.name: s for s in SHAPES + OTHER_SHAPES}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument(
        "--dtypes", nargs="+", default=["bf16", "fp16", "fp32"], choices=["bf16", "fp16", "fp32"]
    )
    parser.add_argument("--shapes", nargs="+", default=list(named))
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    args = parser.parse_args()
    tasks = [(t, d, named[s]) for t in args.targets for d in args.dtypes for s in args.shapes]
    rows = run(tasks, args.jobs)
    rows.sort(key=lambda r: (r["kernel"], r["target"], r["dtype"], r["shape"]))
    print(table(rows))
    bad = [row for row in rows if problems(row)]

    import triton

    result = {"triton": triton.__version__, "kernels": len(rows), "bad": len(bad)}
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result | {"rows": rows}, file, indent=1)
    print(json.dumps(result))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
