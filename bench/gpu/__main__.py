"""Prove or refute csd on a GPU, in under nine and a half minutes.

    python -m bench.gpu --out DIR [--quick] [--device cpu] [--only SECTION ..] [--stretch 2]

Sections of falling value, each with a time box, each writing DIR/SECTION.json row by row: a run
that is killed keeps what it has. On a GPU a section is a process of its own, so that a fault in one
leaves the others alone. Tokens come from `bench/traces/`: figures are speed-ups at those traces'
tau, never of the text of the shapes' real weights. CSD_COMMIT names the commit in the files where
there is no .git.
"""

import argparse
import importlib
import json
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch

from bench.common import finish, table, write
from bench.gpu.plots import draw
from bench.gpu.section import Section

# seconds, and seconds with --quick
BOXES = {
    "compile": (50, 12),
    "parity": (60, 16),
    "end_to_end": (245, 42),
    "attention": (75, 12),
    "outside": (55, 12),
    "drafters": (45, 9),
    "equality": (35, 9),
}
# before its box closes, for a section to end by itself
GRACE = 3
SHOWN = ("shape", "N", "tau", "tokens/s", "plain tokens/s", "speedup", "ideal speedup", "step ms",
         "roofline share", "plain roofline share")  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the result files")
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", nargs="+", choices=list(BOXES), default=list(BOXES))
    parser.add_argument("--stretch", type=float, default=1.0, help="multiply every time box")
    parser.add_argument("--processes", action="store_true", help="one a section on a CPU too")
    parser.add_argument("--section", choices=list(BOXES), help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that torch can use; none is there")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.section:
        return run_here(args, args.section)
    start = time.perf_counter()
    apart = args.processes or args.device == "cuda"
    for name in args.only:
        print(f"{name} ..", flush=True)
        (run_apart if apart else run_here)(args, name)
    return report(args, time.perf_counter() - start)


def run_here(args, name: str) -> int:
    """Run a section in this process and record in its file how it ended."""
    # a process of its own has spent some of its box on imports, and is ended when it closes
    spent = time.time() - args.began + GRACE if args.began else 0.0
    box = BOXES[name][args.quick] * args.stretch - spent
    section = Section(name, args.out, torch.device(args.device), args.quick, box)
    section.write("running")
    try:
        importlib.import_module(f"bench.gpu.{name}").run(section)
    except Exception as error:
        traceback.print_exc()
        section.facts["error"] = f"{type(error).__name__}: {error}"[:1000]
        section.write("failed")
        return 1
    section.write("done")
    return 0


def run_apart(args, name: str) -> int:
    """Run a section in a process that is ended when its box closes."""
    command = [sys.executable, "-m", "bench.gpu", "--out", str(args.out), "--device", args.device]
    command += ["--section", name, "--began", str(time.time())] + ["--quick"] * args.quick
    command += ["--stretch", str(args.stretch)]
    (args.out / f"{name}.json").unlink(missing_ok=True)
    box = BOXES[name][args.quick] * args.stretch
    try:
        code = subprocess.run(command, timeout=box).returncode
    except subprocess.TimeoutExpired:
        return 0
    path = args.out / f"{name}.json"
    found = json.loads(path.read_text()) if path.exists() else {"section": name, "rows": []}
    if code and found.get("status") != "failed":
        # killed from outside, or by a fault that Python could not catch
        found |= {"status": "failed", "error": f"the process ended with code {code}"}
        write(found, path, indent=1)
    return code


def report(args, seconds: float) -> int:
    """The table, the plots, and one JSON line; 1 when a section failed."""
    found = {}
    for name in args.only:
        path = args.out / f"{name}.json"
        found[name] = json.loads(path.read_text()) if path.exists() else {"rows": []}
    status = {
        # what a box has cut is still "running" in its file
        name: {"running": "cut"}.get(data.get("status"), data.get("status", "failed"))
        for name, data in found.items()
    }
    rows = found.get("end_to_end", {"rows": []})["rows"]
    if rows:
        print(table([{k: r[k] for k in SHOWN} for r in rows]))
    plots = draw(rows, args.out)
    result = {
        "bench": "gpu",
        "device": args.device,
        "quick": args.quick,
        "seconds": round(seconds, 1),
        "sections": status,
        "rows": {name: len(data["rows"]) for name, data in found.items()},
        "left out": [why for data in found.values() for why in data.get("left out", [])],
        "plots": plots,
    }
    write(result, args.out / "summary.json", indent=1)
    finish(result)
    return int("failed" in status.values())


if __name__ == "__main__":
    sys.exit(main())
