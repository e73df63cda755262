"""Checks that the source paper leaves open, as one study.

    python -m bench paper --json F --plots DIR [--traces FILE ..] [--prompts FILE] [--quick]

The sections, each with a limit of seconds and each written to F row by row: strictness of the
paper's drafter; diversity of the samples; reduced agreement; other tasks; live runs compared to
their replay; families. A section that is complete in F is kept unless `--only` names it; strictness
and agreement continue where they were cut short.
Traces: `bench/traces/study.jsonl.gz`, and further files, whose first problems are also replayed.
`--quick` is for tests: a toy model and a few tokens.
"""

import argparse
import importlib
import json
import sys
import time
from pathlib import Path

import torch

from bench.lib.common import finish, machine, table, write
from bench.studies.paper.box import Box
from bench.studies.paper.plots import draw

BUDGETS = {
    "strictness": 1800,
    "diversity": 340,
    "agreement": 200,
    "tasks": 240,
    "live": 280,
    "families": 150,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--plots", type=Path, help="folder of the plots; needs matplotlib")
    parser.add_argument("--traces", type=Path, nargs="+", default=[], help="further trace files")
    parser.add_argument("--prompts", type=Path, help="JSONL of problems for the live runs")
    parser.add_argument("--only", nargs="+", choices=list(BUDGETS))
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    result = {"bench": "study", "quick": args.quick, "sections": {}}
    if args.json.exists():
        result["sections"] = json.loads(args.json.read_text())["sections"]
    for name, seconds in BUDGETS.items():
        whole = result["sections"].get(name, {}).get("whole", False)
        if name not in (args.only or BUDGETS) or (not args.only and whole):
            continue
        print(f"{name} ..", flush=True)

        def save(box, name=name, whole=False):
            took = round(time.perf_counter() - box.start, 1)
            # a section may be older than the file, and measured on another machine
            section = {
                "whole": whole,
                "seconds": took,
                "machine": machine(),
                "notes": box.notes,
                "rows": box.rows,
            }
            result["sections"][name] = section
            write(result, args.json, indent=1)

        box = Box(seconds, args.quick, args.traces, args.prompts, save=save)
        if name in ("strictness", "agreement") and not whole:
            box.rows = result["sections"].get(name, {}).get("rows", [])
        importlib.import_module(f"bench.studies.paper.{name}").run(box)
        save(box, whole=not box.cut_short)
    for name, section in result["sections"].items():
        print(f"\n{name}, {section['seconds']} s")
        for columns in dict.fromkeys(tuple(r) for r in section["rows"]):
            print(table([r for r in section["rows"] if tuple(r) == columns]))
        print("\n".join(section["notes"]))
    if args.plots:
        rows = {name: section["rows"] for name, section in result["sections"].items()}
        result["plots"] = draw(rows, args.plots)
    finish(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
