"""Complete answers of up to 3,000 tokens: csd with and without drafts, and other engines.

    python -m bench.long [--model PATH] [--vllm .venv-vllm/bin/python] [--json F] [--minutes 55]
        [--pairs 3] [--without SIDE ...] [--full] [--recorded [TRACES]] [--dry-run]
    python -m bench.long --plot [--json F]

Worked problems, programs and rewriting (`bench/e2e/long/prompts.py`), with the settings of the
model's generation config (at temperature 0.7 without filters if it sets none); the sides alternate
within a row, with the same weights and number of threads. A row is written when it is complete, and
a rerun with the same file continues after the last one. Rows that do not fit in --minutes are left
out, but never the first ones of the plan. --plot prints the table of all rows, from the file alone;
`python -m bench answers` makes the first row's table and plot. llama.cpp needs `pip install
llama-cpp-python` and a GGUF file, vLLM the environment of `make test-vllm`. The method is in
docs/experiments/answers.md.
"""

import argparse
import json
import time
from contextlib import ExitStack
from pathlib import Path

from bench.e2e.long import tables
from bench.e2e.long.plan import PEERS, Cell, plan, summary, supported
from bench.lib.common import finish, merged, table, write
from bench.lib.models import HELP as MODEL
from bench.lib.settings import PLAIN

RESULT = Path("bench/results/long.json")
TRACES = "bench/traces/rewrite.jsonl.gz"
SHAPE = "qwen2.5-0.5b"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help=MODEL)
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument(
        "--without", nargs="+", choices=PEERS, default=[], metavar="SIDE", help="leave sides out"
    )
    parser.add_argument("--minutes", type=float, default=55, help="begin no row beyond these")
    parser.add_argument("--full", action="store_true", help="all sides over the whole grid: hours")
    parser.add_argument(
        "--recorded",
        nargs="?",
        const=TRACES,
        metavar="TRACES",
        help=f"also recorded samples through {SHAPE}'s shape",
    )
    parser.add_argument("--limits", type=int, nargs="+", help="only rows of these limits")
    parser.add_argument("--samples", type=int, nargs="+", help="only rows of these numbers")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and its estimate")
    parser.add_argument("--plot", action="store_true", help="print the file's table only")
    parser.add_argument("--json", type=Path, default=RESULT)
    args = parser.parse_args(argv)
    if args.plot:
        result = json.loads(args.json.read_text())
        print(tables.all_rows(result))
        return
    cells = [
        cell
        for cell in plan(args.full, bool(args.recorded))
        if cell.limit in (args.limits or [cell.limit])
        and cell.samples in (args.samples or [cell.samples])
    ]
    if args.dry_run:
        print(summary(cells, args.pairs))
        return
    run(args, cells)


def run(args: argparse.Namespace, cells: list[Cell]) -> None:
    # imported here, since a plan or a picture does not need them
    from bench.e2e.long.open_sides import open_sides
    from bench.e2e.long.rows import drawn_in_turns, recorded, shown

    begun, expected = time.perf_counter(), 0.0
    with ExitStack() as stack:
        opened = open_sides(args.model, args.vllm, cells, stack, args.without)
        cells = supported(cells, set(opened.sides))
        result = continued(args.json, opened.head)
        for name, why in result["left out"].items():
            print(f"{name} is left out: {why}")
        print(summary(cells, args.pairs), flush=True)
        started = time.perf_counter()
        for cell in cells:
            if any(
                r["name"] == cell.name and set(cell.sides) <= set(r["tok/s"])
                for r in result["rows"]
            ):
                continue
            # actual over estimated time of the rows so far
            pace = (time.perf_counter() - started) / expected if expected else 1.0
            seconds = cell.seconds(args.pairs)
            if time.perf_counter() - begun + seconds * pace > 60 * args.minutes:
                print(f"left out for time: {cell.name}", flush=True)
                continue
            if cell.kind == "recorded":
                row = recorded(cell, args.recorded, SHAPE, opened.dtype, args.pairs)
            else:
                sides = opened.of(cell)
                row = drawn_in_turns(cell, sides, opened.tokenizer, args.pairs)
            expected += seconds
            result["rows"] = merged(result["rows"], [row], ("name",))
            write(result, args.json)
            print(table([shown(row)]), flush=True)
    print(table([shown(row) for row in result["rows"]]))
    finish(result, args.json)


def continued(path: Path, head: dict) -> dict:
    """Returns the result in the file, or a new one; raises ValueError for another model's file."""
    if not path.exists():
        return {"bench": "long", **head, "rows": []}
    before = json.loads(path.read_text())
    for name in ("model", "dtype", "settings"):
        # results from before settings were recorded are of PLAIN
        old = before.get(name, PLAIN)
        if old != head[name]:
            raise ValueError(f"{path} is of {name} {old}, not {head[name]}: give another")
    sides = before["sides"] | head["sides"]
    left_out = {name: why for name, why in head["left out"].items() if name not in sides}
    return {"bench": "long", **head, "sides": sides, "left out": left_out, "rows": before["rows"]}


if __name__ == "__main__":
    main()
