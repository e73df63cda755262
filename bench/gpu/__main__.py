"""Prove or refute csd on a GPU, in ten minutes or in thirty, or in two calls of a lent one.

    python -m bench.gpu --out DIR [--minutes 30] [--only SECTION ..] [--vllm PYTHON] [--device cpu]
    python -m bench.gpu --out DIR --call 1 --into FILE
    python -m bench.gpu --out DIR --call 2 --into FILE [--kept FILE]

The sections run in the order of their value, each with a time limit (its box), and each writes
DIR/SECTION.json row by row, so a killed run keeps its rows. On a GPU each section is a separate
process, so that a fault in one does not affect the others, and its children end with it. The exit
code is 0 if no section failed and parity, if selected, is complete. Tokens come from
`bench/traces/`: figures are speed-ups at those traces' tau, never on text of the shapes' real
weights. CSD_COMMIT names the commit in the files where there is no .git. The calls of a GPU that is
lent for a quarter of an hour (`bench.gpu.calls`) write DIR/CALL/SECTION.json; --into keeps all
results in one file, and --kept is that file of an earlier call.
"""

import argparse
import importlib
import json
import signal
import sys
import time
import traceback
from argparse import Namespace
from pathlib import Path

import torch

from bench.gpu.calls import CALLS, gathered
from bench.gpu.calls import plan as plan_call
from bench.gpu.lib.plots import draw
from bench.gpu.lib.section import Section
from bench.gpu.plan import BOXES, MINUTES, Step, chosen, steps
from bench.gpu.processes import run_groups
from bench.lib.common import finish, table, traced, write

# seconds before its box closes at which a section should end by itself
GRACE = 3
SHOWN = (
    "shape",
    "N",
    "tau",
    "tokens/s",
    "plain tokens/s",
    "speedup",
    "ideal speedup",
    "step ms",
    "roofline share",
    "plain roofline share",
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the result files")
    time_of = parser.add_mutually_exclusive_group()
    time_of.add_argument("--minutes", type=int, default=MINUTES[0], choices=MINUTES)
    time_of.add_argument(
        "--call", type=int, default=0, choices=list(CALLS), help="of a GPU lent for 15 minutes"
    )
    parser.add_argument("--into", type=Path, metavar="FILE", help="one file of all results so far")
    parser.add_argument(
        "--kept",
        type=Path,
        metavar="FILE",
        help="--into of an earlier call: begin with what failed, leave out what is done",
    )
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
    if args.kept and not args.call:
        parser.error("--kept needs --call")
    if args.kept and not args.kept.is_file():
        parser.error(f"--kept must be a file that --into has written; there is no {args.kept}")
    earlier = json.loads(args.kept.read_text()) if args.kept else {}
    if args.call:
        plan = plan_call(args.call, earlier, args.only)
    else:
        plan = steps(chosen(args.minutes, args.only), args.minutes)
    if args.vllm and "vllm" not in [args.section, *(n for step in plan for n in step.sections)]:
        parser.error("--vllm needs --minutes 30, or --only vllm")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.section:
        # the process has used part of its box for imports, and is killed when the box closes
        return run_here(args, args.section, args.seconds - (time.time() - args.began) - GRACE)
    start, ran = time.perf_counter(), []
    with gathered(args.out, args.into, earlier):
        for step in plan:
            left = step.closes - (time.perf_counter() - start)
            if left >= step.least:
                run_step(args, step, left)
                ran.append(step)
        late = [f"{s.call}/{name}" for s in plan if s not in ran for name in s.sections]
        return report(args, ran, late, time.perf_counter() - start)


def folder(args: Namespace, call: int) -> Path:
    return args.out / str(call) if call else args.out


def run_step(args: Namespace, step: Step, seconds: float) -> None:
    of_call = f"call {step.call}: " if step.call else ""
    print(f"{of_call}{', '.join(step.sections)} .. {seconds:.0f} s", flush=True)
    own = Namespace(**vars(args) | {"out": folder(args, step.call), "call": step.call})
    own.out.mkdir(exist_ok=True)
    if args.processes or args.device == "cuda":
        run_apart(own, step.sections, seconds)
    else:
        for name in step.sections:
            run_here(own, name, seconds)


def run_here(args, name: str, seconds: float) -> int:
    """Run a section in this process and record in its file how it ended."""
    device = torch.device(args.device)
    section = Section(name, args.out, device, seconds, args.minutes, args.vllm, args.call)
    section.write("running")
    try:
        importlib.import_module(f"bench.gpu.sections.{name}").run(section)
    except Exception as error:
        traceback.print_exc()
        section.facts["error"] = f"{type(error).__name__}: {error}"[:1000]
        section.facts["traceback"] = traced(error)
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
        time_of = ("--call", args.call) if args.call else ("--minutes", args.minutes)
        command += ["--device", args.device, "--section", name, *map(str, time_of)]
        command += ["--seconds", str(seconds), "--began", str(time.time())]
        commands[name] = command + (["--vllm", args.vllm] if args.vllm else [])
    for name, code in run_groups(commands, seconds).items():
        path = args.out / f"{name}.json"
        section = json.loads(path.read_text()) if path.exists() else {"section": name, "rows": []}
        if code and section.get("status") != "failed":
            # killed by another process, or by a fault that Python cannot catch
            section |= {"status": "failed", "error": f"the process ended with code {code}"}
            write(section, path, indent=1)


def report(args: Namespace, plan: list[Step], late: list[str], seconds: float) -> int:
    """Print the table and one JSON line, and draw the plots; returns the exit code."""
    sections, shown = {}, []
    for step in plan:
        for name in step.sections:
            path = folder(args, step.call) / f"{name}.json"
            sections[f"{step.call}/{name}" if step.call else name] = data = (
                json.loads(path.read_text()) if path.exists() else {"rows": []}
            )
            if name == "end_to_end":
                shown += data["rows"]
    status = {
        # a section that was cut at its box's end is "running" in its file, or has no file
        name: {"running": "cut"}.get(data.get("status", "cut"), data.get("status", "cut"))
        for name, data in sections.items()
    }
    if shown:
        print(table([{k: r[k] for k in SHOWN} for r in shown]))
    for name, data in sections.items():
        if "error" in data:
            print(f"{name} failed: {data['error']}")
    if late:
        print(f"left out for lack of time: {', '.join(late)}")
    # a lent machine has no time for them
    plots = [] if args.call else draw(shown, args.out)
    result = {
        "bench": "gpu",
        "device": args.device,
        **({"call": args.call} if args.call else {"minutes": args.minutes}),
        "seconds": round(seconds, 1),
        "sections": status,
        "rows": {name: len(data["rows"]) for name, data in sections.items()},
        "left out": [why for data in sections.values() for why in data.get("left out", [])]
        + [f"no time: {name}" for name in late],
        "plots": plots,
    }
    write(result, args.out / "summary.json", indent=1)
    finish(result)
    # without parity, figures are of no worth
    unproven = [k for k, s in status.items() if k.endswith("parity") and s != "done"]
    return int("failed" in status.values() or bool(unproven))


if __name__ == "__main__":
    # raises SystemExit, so that sections are ended as after an interrupt
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
