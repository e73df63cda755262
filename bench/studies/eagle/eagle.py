"""EAGLE-2's dynamic tree beside the paper's method, REST and the consensus graph.

    python -m bench eagle HEAD DATASTORE --words GSM8K.jsonl --math MATH.jsonl --json F

HEAD is a folder of `bench eagle_head`, DATASTORE the traces that it was trained on, which REST
reads. SmolLM2-135M-Instruct answers problems that are in neither: of the words' file those after
the first 1,000. A problem is a call of its own. N samples, temperature, nodes a sample:

1 and 8, 0 and 0.7, 16; 1, 0 and 0.7, 60: EAGLE-2's own number.

eagle        the head alone: k paths and k children of a node, `--depth` levels
paper        the literal method of the paper (k = 4, eps = 1); nothing to draft with N = 1
rest         REST over DATASTORE
consensus    csd's graph
pool         graph and head in one pool, by measured reliability

tau, tokens committed per sample and step; accepted drafts of a sample and step; their share of the
nodes; all with 95% intervals over problems. A drafter's milliseconds of a step are the median over
problems; they and tokens per second are shown of a machine with nothing else to do, with `--times`.
Rows replace those in F, so a run can be split. `--table F` prints its tables instead, and
`--plot PICTURE --trained FILE` draws them beside the curve of `bench eagle_head --json FILE`.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import csd
from bench.lib.common import finish, machine, merged, write
from bench.studies.eagle.eagle_head import PROBLEMS
from bench.studies.eagle.eagle_plot import draw
from bench.studies.eagle.eagle_tables import tables, tau
from csd.models.demo import smollm2_path

DRAFTERS = ("eagle", "paper", "rest", "consensus", "pool")
# samples, temperature, nodes of a sample
CELLS = [(n, t, 16) for n in (1, 8) for t in (0.0, 0.7)] + [(1, t, 60) for t in (0.0, 0.7)]
# arguments that change no row
VIEWS = ("json", "table", "times", "plot", "trained")
FIELDS = ("task", "samples", "temperature", "nodes", "drafter")


def problems_of(path: Path, skip: int, count: int) -> list[list[dict]]:
    """Messages of a file's problems, spread evenly over those behind the first `skip`."""
    lines = path.read_text().splitlines()[skip:]
    rows = [json.loads(line) for line in lines[:: max(len(lines) // count, 1)][:count]]
    texts = [row.get("question") or row["problem"] for row in rows]
    return [[{"role": "user", "content": text}] for text in texts]


def drafter_of(name: str, args):
    heads = dict(k=args.k, depth=args.depth)
    if name == "eagle":
        return csd.Eagle(args.head, **heads)
    if name == "pool":
        return csd.Eagle(args.head, graph=True, **heads)
    return f"rest:{args.datastore}" if name == "rest" else name


def drawn(engine, prompt, drafter, cell: tuple, tokens: int) -> dict:
    """Figures of one problem."""
    samples, temperature, nodes = cell
    start = time.perf_counter()
    out = csd.generate(
        engine,
        prompt,
        num_samples=samples,
        temperature=temperature,
        drafter=drafter,
        seed=1,
        max_new_tokens=tokens,
        budget=nodes * samples,
    )
    stats = out.stats
    return {
        "tokens": stats.tokens,
        "steps": stats.sample_steps,
        "proposed": stats.nodes_proposed,
        "accepted": stats.nodes_accepted,
        "seconds": time.perf_counter() - start,
        "draft_seconds": (stats.seconds["propose"] + stats.seconds["insert"]) / stats.steps,
    }


def measured(engine, prompts: dict[str, list], args) -> Iterator[dict]:
    """A row for each task, cell and drafter, with a list over problems of each figure."""
    for task, asked in prompts.items():
        for cell in CELLS:
            if cell[0] not in args.samples or cell[2] not in args.nodes:
                continue
            for name in args.drafters:
                drafter = drafter_of(name, args)
                draws = [drawn(engine, p, drafter, cell, args.tokens) for p in asked]
                row = dict(zip(FIELDS, (task, *cell, name), strict=True))
                figures = {key: [f[key] for f in draws] for key in draws[0]}
                yield row | figures | {"load": os.getloadavg()[0]}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("head", nargs="?")
    parser.add_argument("datastore", nargs="?")
    parser.add_argument("--words", type=Path, help="GSM8K's test file")
    parser.add_argument("--math", type=Path, help="problems of MATH")
    parser.add_argument("--drafters", nargs="+", default=DRAFTERS, choices=DRAFTERS)
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 60])
    parser.add_argument("--problems", type=int, default=10, help="of each file")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--json", help="write here, and keep what is there of other rows")
    parser.add_argument("--times", action="store_true", help="with --table: times and rates too")
    parser.add_argument("--table", metavar="FILE", help="print this file's tables instead")
    parser.add_argument("--plot", metavar="PICTURE", help="with --table and --trained")
    parser.add_argument("--trained", metavar="FILE", help="result of `bench eagle_head`")
    args = parser.parse_args(argv)
    result: dict[str, Any]
    if args.table:
        result = json.loads(Path(args.table).read_text())
        print("\n\n".join(tables(result, args.times)))
        if args.plot:
            if args.trained is None:
                parser.error("--plot needs --trained FILE")
            draw(result, json.loads(Path(args.trained).read_text()), args.plot)
        return
    if args.datastore is None:
        parser.error("give HEAD and DATASTORE, or --table FILE")
    torch.set_num_threads(1)
    files = {"word problems": (args.words, PROBLEMS), "MATH": (args.math, 0)}
    prompts = {
        task: problems_of(path, skip, args.problems) for task, (path, skip) in files.items() if path
    }
    result = {"bench": "eagle", "runs": [], "rows": []}
    if args.json and Path(args.json).exists():
        result |= json.loads(Path(args.json).read_text())
    arguments = {
        k: str(v)
        for k, v in vars(args).items()
        if k not in ("json", "table", "times", "plot", "trained")
    }
    result["runs"].append({"machine": machine(), "arguments": arguments})
    engine = csd.Engine(smollm2_path())
    # compiles loops, outside every figure
    csd.generate(engine, "a", num_samples=2, max_new_tokens=4, seed=0)
    for row in measured(engine, prompts, args):
        result["rows"] = merged(result["rows"], [row], FIELDS)
        write(result, args.json)
        print(*(row[name] for name in FIELDS), f"tau {tau(row):.3f}", flush=True)
    finish(result, args.json)


if __name__ == "__main__":
    main()
