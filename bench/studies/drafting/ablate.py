"""Gain of each part of the consensus graph: replays with one constant changed at a time.

    python -m bench ablate TRACES [--samples 8] [--nodes 16] [--set "beta=0.5;decay=1"] [--json F]

Each line has tau over all problems of a file, and its ratio to the unchanged graph. Without `--set`
every line of `CHANGES` runs. Values are Python literals; an observation has weight `WEIGHT_ONE`.
Other files in an existing F keep their columns, so a long run can be split by trace.
"""

import argparse
import ast
import json
import time
from dataclasses import replace
from pathlib import Path

import torch

from bench.lib.common import write
from bench.studies.drafting.replay import tau
from csd.evaluate.replay import replay
from csd.graph.consensus import ConsensusGraph
from csd.kernels.ops import reference
from csd.state.context_table import WEIGHT_ONE, GraphConfig
from csd.traces.traces import Trace, read_traces

ONE = WEIGHT_ONE
CHANGES = [
    {},
    {"successors": 8},
    {"decay": 1.0},
    {"decay": 0.7},
    {"settle": 0},
    {"own_weight": 1.0},
    {"own_weight": 8.0},
    {"trust": 0.5},
    {"trust": 0.99},
    {"orders": (1, 2, 3)},
    {"orders": (1, 2, 3, 5, 8)},
    {"orders": (1, 2, 4, 8, 16)},
    {"group_penalty": 0},
    {"smoothing": ONE * 35 // 100},
    {"smoothing": ONE * 14 // 10},
    {"hard_weight": 0},
    {"hard_weight": ONE},
    {"prompt_weight": ONE // 4},
    {"prompt_weight": ONE // 2},
    {"beta": 0.3},
    {"beta": 0.5},
    {"beta_order": 0.1},
    {"beta_order": 0.2},
    {"uncoupled": 0.0},
    {"uncoupled": 0.1},
    {"uncoupled": 0.3},
    {"frontier": 4},
]


def run(traces: list[Trace], config: GraphConfig, samples: int, nodes: int) -> list:
    device = torch.device("cpu")
    return [
        replay(trace, ConsensusGraph(reference(), device, config), samples, nodes)
        for trace in traces
    ]


def named(change: dict) -> str:
    return ", ".join(f"{name}={value}" for name, value in change.items()) or "as it is"


def parse(text: str) -> dict:
    """Parse name=value[;name=value ..] to fields of `GraphConfig`."""
    change = {}
    for part in text.split(";"):
        name, equals, value = part.partition("=")
        if not equals or name not in GraphConfig.__dataclass_fields__:
            raise argparse.ArgumentTypeError(f"must be FIELD=VALUE of GraphConfig, got {part!r}")
        change[name] = ast.literal_eval(value)
    return change


def joined(old: dict, new: dict) -> dict:
    """Join the columns of both; a file's new column replaces its old one. Rows are `new`'s."""
    was = {row["change"]: row for row in old["rows"]}
    out = new | {"seconds": old["seconds"] + new["seconds"]}
    for name in ("samples", "problems"):
        out[name] = old[name] | new[name]
    for row in new["rows"]:
        for name in ("tau", "ratio"):
            row[name] = was.get(row["change"], {}).get(name, {}) | row[name]
    return out


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--problems", type=int, help="the first so many of each file")
    parser.add_argument("--temperature", type=float, nargs="+", help="a column each")
    parser.add_argument("--set", type=parse, nargs="+", dest="changes", metavar="FIELD=VALUE")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    changes = [{}, *args.changes] if args.changes else CHANGES
    files = {}
    for path in args.traces:
        name, traces = Path(path).name.split(".jsonl")[0], list(read_traces(path))
        for t in args.temperature or [None]:
            at = [trace for trace in traces if t in (None, trace.temperature)]
            files[name if t is None else f"{name}, T={t}"] = at[: args.problems]
    # a file with fewer samples is replayed with all of them
    samples = {
        name: min(args.samples, *(len(t.samples) for t in traces)) for name, traces in files.items()
    }
    print("".join(f"{name[:26]:>28}" for name in files))
    rows, first, start = [], {}, time.time()
    for change in changes:
        row = {"change": named(change), "tau": {}, "ratio": {}}
        for name, traces in files.items():
            mean_tau = tau(run(traces, replace(GraphConfig(), **change), samples[name], args.nodes))
            row["tau"][name] = mean_tau
            row["ratio"][name] = mean_tau / first.setdefault(name, mean_tau)
        rows.append(row)
        cells = (f"{row['tau'][n]:20.3f} {row['ratio'][n]:.3f}x" for n in files)
        print("".join(f"{c:>28}" for c in cells), f"  {row['change']}", flush=True)
    result = {
        "samples": samples,
        "problems": {name: len(traces) for name, traces in files.items()},
        "nodes": args.nodes,
        "seconds": time.time() - start,
        "rows": rows,
    }
    if args.json and Path(args.json).exists():
        result = joined(json.loads(Path(args.json).read_text()), result)
    write(result, args.json, indent=1)


if __name__ == "__main__":
    main()
