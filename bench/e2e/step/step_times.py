"""Seconds of a step by its number of rows, as an engine measures them when it starts.

    python -m bench step_times [MODEL] [--rounds N] [--profile ROWS] [--json F]

Forward and verify over empty caches; SmolLM2-135M when no model is given. `csd replay --cost F`
reads the file, whose `seconds` are those of csd with default options. On a CPU it also has, in
alternated rounds, the model in float32 and in bfloat16 with plain weights, as in a user's module,
and in float32 with packed ones (`csd/models/fused/fuse.py`). A side's figure is the minimum of all
rounds, and a ratio to float32 with plain weights is the median of the rounds' ratios. --profile
prints the operations of one step that take longest.
"""

import argparse
import math
import statistics

import torch

import csd
from bench.e2e.cpu import module
from bench.lib.common import finish, table
from bench.lib.models import path_of

ROUNDS = 3
PLAIN = "float32, plain"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="as of csd.generate; a folder or a file on a CPU")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--profile", type=int, metavar="ROWS")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    engines = sides(path_of(args.model))
    times: dict[str, list] = {name: [] for name in engines}
    for _ in range(args.rounds):
        for name, engine in engines.items():
            times[name].append(engine.step_times.measure(worth=math.inf))
    rows = times["seconds"][0].sizes
    result = {"bench": "step_times", "rows": rows}
    for name, tables in times.items():
        result[name] = [min(each) for each in zip(*(t.seconds for t in tables), strict=True)]
    result["dtype"] = str(engines["seconds"].dtype)
    print(table([{"rows": m} | {n: result[n][i] for n in times} for i, m in enumerate(rows)]))
    if PLAIN in times:
        result["speed-up"] = {n: speed_ups(times[PLAIN], f) for n, f in times.items() if n != PLAIN}
        print(f"\ntimes as fast as {PLAIN}")
        gains = result["speed-up"]
        print(table([{"rows": m} | {n: gains[n][i] for n in gains} for i, m in enumerate(rows)]))
    if args.profile:
        print(profile(engines["seconds"], args.profile))
    finish(result, args.json)


def sides(model: str) -> dict[str, csd.Engine]:
    """Engines by the name of their result; `seconds` is csd with default options."""
    engines = {"seconds": csd.Engine(model)}
    if engines["seconds"].device.type == "cpu":
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            engines[f"{name}, plain"] = csd.Engine(module(model, dtype))
            if dtype != engines["seconds"].dtype:
                engines[f"{name}, packed"] = csd.Engine(model, dtype=dtype)
    return engines


def speed_ups(base: list, other: list) -> list[float]:
    """Speed-up of `other` over `base` at each number of rows, the median over rounds."""
    ratios = (
        [a / b for a, b in zip(x.seconds, y.seconds, strict=True)]
        for x, y in zip(base, other, strict=True)
    )
    return [statistics.median(each) for each in zip(*ratios, strict=True)]


def profile(engine: csd.Engine, rows: int, steps: int = 10) -> str:
    """Table of operations by self time, for steps over empty slots."""
    from torch.profiler import ProfilerActivity

    from csd.engine.first_call.time_steps import time_steps

    step = engine.caches.small_step(rows + 1)
    sizes = [rows, rows + 1]
    time_steps(step, sizes)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile_run:
        for _ in range(steps):
            time_steps(step, sizes)
    return profile_run.key_averages().table(sort_by="self_cpu_time_total", row_limit=20)


if __name__ == "__main__":
    main()
