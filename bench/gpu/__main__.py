"""Prove or refute csd on a GPU, in ten minutes or in thirty.

    python -m bench.gpu --out DIR [--minutes 30] [--only SECTION ..] [--vllm PYTHON] [--device cpu]

The sections run in the order of their value, each with a time limit (its box), and each writes
DIR/SECTION.json row by row, so a killed run keeps its rows. On a GPU each section is a separate
process, so that a fault in one does not affect the others, and its children end with it. The exit
code is 0 if no section failed and parity, if selected, is complete. Tokens come from
`bench/traces/`: figures are speed-ups at those traces' tau, never on text of the shapes' real
weights. CSD_COMMIT names the commit in the files where there is no .git.
"""

import argparse
import importlib
import json
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from bench.gpu.against import PREDICTED, compared, of_gpu
from bench.gpu.plan import BOXES, MINUTES, chosen, steps
from bench.gpu.plots import draw
from bench.gpu.processes import run_groups
from bench.gpu.section import Section
from bench.lib.common import finish, table, write

# seconds before its box closes at which a section should end by itself
GRACE = 3
SHOWN = ("shape", "N", "tau", "tokens/s", "plain tokens/s", "speedup", "ideal speedup", "step ms",
         "roofline share", "plain roofline share")  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the result files")
    parser.add_argument("--minutes", type=int, default=10, choices=MINUTES)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", nargs="+", choices=list(BOXES))
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter that imports vLLM")
    parser.add_argument("--processes", action="store_true", help="one a section on a CPU too")
    parser.add_argument("--section", choices=list(BOXES), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that torch can use; none is there")
    names = chosen(args.minutes, args.only)
    if args.vllm and "vllm" not in [args.section, *names]:
        parser.error("--vllm needs --minutes 30, or --only vllm")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.section:
        # the process has used part of its box for imports, and is killed when the box closes
        return run_here(args, args.section, args.seconds - (time.time() - args.began) - GRACE)
    start = time.perf_counter()
    apart = args.processes or args.device == "cuda"
    for together, closes in steps(names, args.minutes):
        print(f"{', '.join(together)} ..", flush=True)
        left = closes - (time.perf_counter() - start)
        if apart:
            run_apart(args, together, left)
        else:
            for name in together:
                run_here(args, name, left)
    return report(args, names, time.perf_counter() - start)


def run_here(args, name: str, seconds: float) -> int:
    """Run a section in this process and record in its file how it ended."""
    section = Section(name, args.out, torch.device(args.device), seconds, args.minutes, args.vllm)
    section.write("running")
    try:
        importlib.import_module(f"bench.gpu.{name}").run(section)
    except Exception as error:
        traceback.print_exc()
        section.facts["error"] = f"{type(error).__name__}: {error}"[:1000]
        section.write("failed")
        return 1
    section.end()
    return 0


def run_apart(args, names: list[str], seconds: float) -> None:
    """Run sections side by side, in processes that end when their box closes."""
    commands = {}
    for name in names:
        (args.out / f"{name}.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", "bench.gpu", "--out", str(args.out)]
        command += ["--device", args.device, "--minutes", str(args.minutes), "--section", name]
        command += ["--seconds", str(seconds), "--began", str(time.time())]
        commands[name] = command + (["--vllm", args.vllm] if args.vllm else [])
    for name, code in run_groups(commands, seconds).items():
        path = args.out / f"{name}.json"
        found = json.loads(path.read_text()) if path.exists() else {"section": name, "rows": []}
        if code and found.get("status") != "failed":
            # killed by another process, or by a fault that Python cannot catch
            found |= {"status": "failed", "error": f"the process ended with code {code}"}
            write(found, path, indent=1)


def report(args, names: list[str], seconds: float) -> int:
    """Print the table and one JSON line, and draw the plots; returns the exit code."""
    found = {}
    for name in names:
        path = args.out / f"{name}.json"
        found[name] = json.loads(path.read_text()) if path.exists() else {"rows": []}
    status = {
        # a section that was cut at its box's end is "running" in its file, or has no file
        name: {"running": "cut"}.get(data.get("status", "cut"), data.get("status", "cut"))
        for name, data in found.items()
    }
    rows = found.get("end_to_end", {"rows": []})["rows"]
    if rows:
        print(table([{k: r[k] for k in SHOWN} for r in rows]))
    for name, data in found.items():
        if "error" in data:
            print(f"{name} failed: {data['error']}")
    shapes = args.out / "attention_shapes.json"
    timed = {"attention_shapes": json.loads(shapes.read_text())} if shapes.exists() else {}
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    beside = compared(found | timed, of_gpu(gpu))
    if beside:
        print(f"measured over predicted (predictions of no measurement, {PREDICTED.name}):")
        print(table(beside))
    plots = draw(rows, args.out)
    result = {
        "bench": "gpu",
        "device": args.device,
        "minutes": args.minutes,
        "seconds": round(seconds, 1),
        "sections": status,
        "rows": {name: len(data["rows"]) for name, data in found.items()},
        "left out": [why for data in found.values() for why in data.get("left out", [])],
        "against predictions": beside,
        "plots": plots,
    }
    write(result, args.out / "summary.json", indent=1)
    finish(result)
    return int("failed" in status.values() or status.get("parity", "done") != "done")


if __name__ == "__main__":
    # raises SystemExit, so that sections are ended as after an interrupt
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
