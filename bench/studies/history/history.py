"""Replay traces with past samples of each prompt: the gain of history for each drafter.

    python -m bench history TRACES [--problems 12] [--history 0 1 2 4 8] [--nodes 4 8 16]
        [--workers 2] [--json F] [--plot F.svg]

The first half of a prompt's samples, at most 8, are live; those after them are its history. A row
has tokens per sample and step (tau) with the 95% interval of a bootstrap over problems, and the
ratio to the same case without history. Kinds of history:

    tokens     token ids only, as counts
    top 8      with the target's probabilities at each token, if they are recorded
    foreign    another problem's samples, as a control
    no copies  without samples that equal a live one
    aged       each sample one epoch older than the one before it, with half its weight
    together   the same samples, but live together with the others instead of as history

The other drafters get the same history (`history_rivals.py`). Propose is CPU time per step, and
its ratio is the median over problems, whose replays alternate. An existing result file is
completed: other traces are kept, as are drafters and numbers of nodes that are not replayed again.
"""

import argparse
import json
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.lib.common import finish, interval, table
from bench.studies.drafting.replay import tau
from bench.studies.history.history_rivals import RIVALS_WITH_HISTORY, with_history
from csd.evaluate.replay import Replayed, replay
from csd.graph.consensus import ConsensusGraph
from csd.graph.history import PastSample
from csd.kernels.ops import reference
from csd.traces.traces import Trace, read_traces

MAX_LIVE = 8
# drafted nodes at which kinds of history and drafters are compared
NODES = 8


@dataclass(frozen=True)
class Case:
    """Case of one line of the table."""

    history: int
    nodes: int
    kind: str = "tokens"
    drafter: str = "consensus"


def cases(traces: list[Trace], counts: list[int], nodes: list[int], rivals: list[str]) -> list:
    """Cases to replay for each problem, with cases to be compared next to each other."""
    largest = min(len(t.samples) for t in traces) - live_of(traces)
    counts = [c for c in counts if c <= largest]
    listed = []
    for n in nodes:
        for count in counts:
            listed.append(Case(count, n))
            if count and all(t.top for t in traces):
                listed.append(Case(count, n, "top 8"))
    if NODES in nodes and max(counts):
        listed += [
            Case(max(counts), NODES, kind) for kind in ("foreign", "no copies", "aged", "together")
        ]
        listed += [Case(c, NODES, drafter=name) for name in rivals for c in (0, max(counts))]
    return listed


def live_of(traces: list[Trace]) -> int:
    return min(MAX_LIVE, min(len(t.samples) for t in traces) // 2)


def past_samples(trace: Trace, live: int, case: Case, other: Trace) -> list[PastSample]:
    """History of a problem, newest first. other: problem whose samples are the foreign history."""
    source = other if case.kind == "foreign" else trace
    past = slice(live, live + case.history)
    samples = source.samples[past]
    tops = source.top[past] if case.kind == "top 8" and source.top else [None] * len(samples)
    here = trace.samples[:live]
    return [
        PastSample.of(s, t, i if case.kind == "aged" else 0)
        for i, (s, t) in enumerate(zip(samples, tops, strict=True))
        if case.kind != "no copies" or s not in here
    ]


def run(trace: Trace, live: int, case: Case, other: Trace) -> Replayed:
    """Replay one case of one problem."""
    history = past_samples(trace, live, case, other)
    if case.kind == "together":
        live, history = live + case.history, []
    live_trace = replace(trace, samples=trace.samples[:live], top=trace.top and trace.top[:live])
    if case.drafter == "consensus":
        drafter = ConsensusGraph(reference(), "cpu", history=bool(history))
        return replay(
            live_trace, drafter, live, case.nodes, history=history, clock=time.thread_time
        )
    drafter = with_history(case.drafter, history)
    return replay(live_trace, drafter, live, case.nodes, clock=time.thread_time)


def replay_problem(job: tuple[Trace, Trace, int, list[Case]]) -> list[Replayed]:
    """Replay every case of one problem, in the order of the cases."""
    torch.set_num_threads(1)
    trace, other, live, wanted = job
    return [run(trace, live, case, other) for case in wanted]


def replay_all(traces: list[Trace], wanted: list[Case], workers: int) -> dict[Case, list[Replayed]]:
    """Replay every case of every problem, in `workers` processes; returns the results by case."""
    live = live_of(traces)
    jobs = [(trace, traces[(i + 1) % len(traces)], live, wanted) for i, trace in enumerate(traces)]
    if workers == 1:
        results = list(map(replay_problem, jobs))
    else:
        with ProcessPoolExecutor(workers) as pool:
            results = list(pool.map(replay_problem, jobs))
    return dict(zip(wanted, map(list, zip(*results, strict=True)), strict=True))


def rows_of(by_case: dict[Case, list[Replayed]], live: int) -> Iterator[dict]:
    """Yield the lines of the table."""
    for case, results in by_case.items():
        count = len(results)
        base = by_case[Case(0, case.nodes, drafter=case.drafter)]
        row = {
            "drafter": case.drafter,
            "live": live + case.history * (case.kind == "together"),
            "history": case.history * (case.kind != "together"),
            "nodes": case.nodes,
            "kind": case.kind,
            "tau": tau(results),
            "interval": interval(lambda p, r=results: tau([r[i] for i in p]), count),
            "steps": sum(r.steps for r in results),
            "to_none": ratio(results, base),
            "to_none_interval": ratio_interval(results, base),
            "propose_us": 1e6
            * sum(r.propose_seconds for r in results)
            / sum(r.steps for r in results),
            "propose_to_none": median(
                (a.propose_seconds / a.steps) / (b.propose_seconds / b.steps)
                for a, b in zip(results, base, strict=True)
            ),
            "from_history": results_share(results),
        }
        same = {
            other: r
            for other, r in by_case.items()
            if other.drafter != "consensus"
            and (other.history, other.nodes) == (case.history, case.nodes)
        }
        if case.drafter == "consensus" and case.kind == "tokens" and same:
            best = max(same, key=lambda other: tau(same[other]))
            row["best_other"] = best.drafter
            row["to_best"] = ratio(results, same[best])
            row["to_best_interval"] = ratio_interval(results, same[best])
        yield row


def results_share(results: list[Replayed]) -> float:
    """Share of committed tokens that only the history had drafted."""
    return sum(r.sources[4] for r in results) / sum(r.tokens for r in results)


def ratio(ours: list[Replayed], theirs: list[Replayed]) -> float:
    return tau(ours) / tau(theirs)


def ratio_interval(ours: list[Replayed], theirs: list[Replayed]) -> tuple[float, float]:
    def of(pick: list[int]) -> float:
        return ratio([ours[i] for i in pick], [theirs[i] for i in pick])

    return interval(of, len(ours))


def shown(row: dict) -> dict:
    """Returns a row in the form of the printed table."""
    low, high = row["interval"]
    return {
        "drafter": row["drafter"],
        "live": row["live"],
        "history": row["history"],
        "nodes": row["nodes"],
        "kind": row["kind"],
        "tau": f"{row['tau']:.2f}",
        "95%": f"{low:.2f}-{high:.2f}",
        "steps": row["steps"],
        "to none": f"{row['to_none']:.2f}",
        "to best other": f"{row['to_best']:.2f} {row['best_other']}" if "to_best" in row else "",
        "propose us": f"{row['propose_us']:.0f}",
        "propose": f"{row['propose_to_none']:.2f}",
    }


def plot(by_trace: dict[str, dict], path: str) -> None:
    """Plot tau over past samples, one panel per trace, one line per number of nodes and kind."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # makes the file reproducible
    matplotlib.rcParams["svg.hashsalt"] = "csd"
    size = (3.2 * len(by_trace), 3.6)
    fig, axes = plt.subplots(1, len(by_trace), figsize=size, squeeze=False)
    labels: dict[str, Any] = {}
    for ax, (name, result) in zip(axes[0], by_trace.items(), strict=True):
        rows = [r for r in result["rows"] if r["drafter"] == "consensus"]
        for nodes in sorted({r["nodes"] for r in rows}):
            for kind, style in (("tokens", "-"), ("top 8", "--")):
                line = [r for r in rows if r["nodes"] == nodes and r["kind"] in (kind,)]
                if line and kind == "top 8":
                    line = [r for r in rows if r["nodes"] == nodes and not r["history"]][:1] + line
                if line:
                    x, y = [r["history"] for r in line], [r["tau"] for r in line]
                    colour = f"C{sorted({r['nodes'] for r in rows}).index(nodes)}"
                    (labels[f"{nodes} nodes, {kind}"],) = ax.plot(
                        x, y, style, color=colour, marker="o"
                    )
        ax.set(xlabel="past samples of the prompt", ylim=(1, None))
        ax.set_title(f"{name},\n{rows[0]['live']} live", fontsize=10)
        ax.set_xticks(sorted({r["history"] for r in rows}))
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("tokens per sample and step")
    fig.legend(labels.values(), labels, ncols=3, loc="lower center")
    fig.tight_layout(rect=(0, 0.06 * -(-len(labels) // 3), 1, 1))
    fig.savefig(path, metadata={"Date": None})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--history", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument(
        "--problems", type=int, nargs="+", default=[None], help="the first so many of each file"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument(
        "--drafters", nargs="*", default=list(RIVALS_WITH_HISTORY), choices=RIVALS_WITH_HISTORY
    )
    parser.add_argument("--json")
    parser.add_argument("--plot")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    counts = sorted({0, *args.history})
    by_trace: dict[str, dict] = {}
    if args.json and Path(args.json).exists():
        by_trace = json.loads(Path(args.json).read_text())["traces"]
    problems = [*args.problems, *args.problems[-1:] * len(args.traces)]
    for path, count in zip(args.traces, problems, strict=False):
        traces = list(read_traces(path))[:count]
        name = Path(path).name.split(".jsonl")[0]
        live = live_of(traces)
        copies = sum(len(t.samples) - len({tuple(s) for s in t.samples}) for t in traces)
        wanted = cases(traces, counts, args.nodes, args.drafters)
        results = replay_all(traces, wanted, args.workers)
        rows = list(rows_of(results, live))
        if name in by_trace and by_trace[name]["problems"] == len(traces):
            again = {(r["drafter"], r["nodes"]) for r in rows}
            rows += [r for r in by_trace[name]["rows"] if (r["drafter"], r["nodes"]) not in again]
        by_trace[name] = {"problems": len(traces), "copies": copies, "rows": rows}
        print(f"{name}: {len(traces)} problems, {copies} exact copies among their samples")
        print(table([shown(r) for r in rows]), flush=True)
    if args.plot:
        plot(by_trace, args.plot)
    finish({"bench": "history", "traces": by_trace}, args.json)


if __name__ == "__main__":
    main()
