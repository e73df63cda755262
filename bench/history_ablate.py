"""Replay history with one constant changed at a time, and what other prompts said.

    python -m bench.history_ablate TRACES [--history 4] [--nodes 8] [--problems 6]
        [--set "history_weight=131072;trust=0.9"] [--share 1 4 8] [--json F]

Live and earlier samples are those of `bench.history`. Without `--set` every line of `CHANGES` runs.
With `--share N ...` no sample has a history, and one sample of each other problem of the file
enters the contexts of at most 2 tokens, at a quarter of a token's weight or at its whole weight:
what `share="call"` would do for N samples of a prompt. Ratios are to the first line of each block,
with the 95% interval of a bootstrap over problems. A result file that exists is completed: other
traces stay.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.ablate import named, parse
from bench.common import finish, table
from bench.history import live_of, ratio, ratio_interval
from bench.replay import tau
from csd.evaluate.replay import Replayed, replay
from csd.graph.consensus import PIECE, WITH_HISTORY, ConsensusGraph, insert_history
from csd.graph.history import Earlier, Rows, pieces
from csd.kernels.ops import reference
from csd.state.context_table import WEIGHT_ONE, GraphConfig
from csd.state.slots import Slots
from csd.traces.traces import Trace, read_traces

CHANGES = [
    {},
    {"history_weight": WEIGHT_ONE // 2},
    {"history_weight": WEIGHT_ONE * 2},
    {"history_weight": WEIGHT_ONE * 4},
    {"orders": (1, 2, 3, 5, 8)},
    {"orders": (1, 2, 4, 8, 12)},
    {"orders": (1, 3, 6, 10, 16)},
    {"orders": (2, 4, 8, 16)},
    {"orders": (1, 2, 4, 8, 12, 16)},
    {"settle": 0},
    {"decay": 0.85},
    {"decay": 0.95},
    {"trust": 0.75},
    {"trust": 0.95},
]
# tokens of the longest context that other prompts enter
SHORT = 2


class Shared(ConsensusGraph):
    """A graph whose history is other prompts' samples."""

    def __init__(self, halved: int):
        super().__init__(reference(), "cpu", GraphConfig())
        self.halved = halved

    def enter_history(
        self, group_key: int, prompt: list[int], history: Sequence[Earlier], slots: Slots
    ) -> Iterator[int]:
        for rows in pieces([], history, self.config, PIECE):
            context = rows.context.copy()
            context[:, SHORT:] = -1
            low = Rows(context, rows.token, rows.weight >> self.halved, rows.total >> self.halved)
            insert_history(
                self.table, group_key, low, slots.group_key, self.config, self._ops.graph_insert
            )
            yield len(rows)


def line(name: str, found: list[Replayed], first: list[Replayed]) -> dict:
    return {"change": name, "tau": tau(found), "to_first": ratio(found, first),
            "interval": ratio_interval(found, first)}  # fmt: skip


def changed(traces: list[Trace], changes: list[dict], count: int, nodes: int) -> list[dict]:
    """A line for each change of the graph that has the history."""
    live, rows, first = live_of(traces), [], None
    for change in changes:
        config = replace(GraphConfig(**WITH_HISTORY), **change)
        found = [
            replay(replace(t, samples=t.samples[:live], top=t.top and t.top[:live]),
                   ConsensusGraph(reference(), "cpu", config), live, nodes,
                   history=[Earlier.of(s) for s in t.samples[live : live + count]])
            for t in traces
        ]  # fmt: skip
        first = first or found
        rows.append(line(named(change), found, first) | {"live": live})
        print(rows[-1], flush=True)
    return rows


def shared(traces: list[Trace], live: int, nodes: int) -> list[dict]:
    """A line without other prompts, and one for each weight of theirs."""
    rows, first = [], None
    for name, halved in (("alone", None), ("others, a quarter", 2), ("others, whole", 0)):
        found = []
        for t in traces:
            drafter = Shared(halved or 0)
            others = [Earlier.of(o.samples[0]) for o in traces if o is not t]
            told = [] if halved is None else others
            shown = replace(t, samples=t.samples[:live], top=t.top and t.top[:live])
            found.append(replay(shown, drafter, live, nodes, history=told))
        first = first or found
        rows.append(line(name, found, first) | {"live": live})
        print(rows[-1], flush=True)
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--history", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--problems", type=int, help="the first so many of each file")
    parser.add_argument("--set", type=parse, nargs="+", dest="changes", metavar="FIELD=VALUE")
    parser.add_argument("--share", type=int, nargs="+", metavar="N")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    found: dict[str, dict] = {}
    if args.json and Path(args.json).exists():
        found = json.loads(Path(args.json).read_text())["traces"]
    for path in args.traces:
        traces = list(read_traces(path))[: args.problems]
        if args.share:
            fits = [n for n in args.share if n <= min(len(t.samples) for t in traces)]
            rows = [row for n in fits for row in shared(traces, n, args.nodes)]
        else:
            changes = [{}, *args.changes] if args.changes else CHANGES
            rows = changed(traces, changes, args.history, args.nodes)
        name = Path(path).name.split(".jsonl")[0]
        found[name] = {"problems": len(traces), "rows": rows}
        print(name, table([r | {"interval": "{:.2f}-{:.2f}".format(*r["interval"])} for r in rows]),
              sep="\n", flush=True)  # fmt: skip
    finish({"bench": "history_ablate", "nodes": args.nodes, "history": args.history,
            "traces": found}, args.json)  # fmt: skip


if __name__ == "__main__":
    main()
