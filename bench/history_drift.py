"""How history fades when it was drawn at another temperature than what it drafts for.

    python -m bench.history_drift TRACES [--at 0.7] [--samples 4] [--nodes 8] [--json F]

Traces of the same prompts at several temperatures, as `bench/traces/study.jsonl.gz` has them.
The first `--samples` at `--at` are live; history is as many samples of each temperature,
of the same one those behind the live ones.
"""

import argparse
from dataclasses import replace

import torch

from bench.common import finish, table
from bench.replay import interval, tau
from csd.evaluate.replay import Replayed, replay
from csd.graph.consensus import ConsensusGraph
from csd.graph.history import Earlier
from csd.kernels.ops import reference
from csd.traces.traces import Trace, read_traces


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--at", type=float, default=0.7)
    parser.add_argument("--samples", type=int, default=4, help="live, and of each history")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--problems", type=int)
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    groups: dict[tuple, dict[float, Trace]] = {}
    for path in args.traces:
        for trace in read_traces(path):
            known = groups.setdefault(tuple(trace.prompt), {})
            # the recording with most samples
            if len(trace.samples) > len(getattr(known.get(trace.temperature), "samples", ())):
                known[trace.temperature] = trace
    wanted = [g for g in groups.values() if len(g) > 1 and args.at in g]
    # those recorded at most temperatures
    wanted = [g for g in wanted if len(g) == max(map(len, wanted))][: args.problems]
    if not wanted:
        raise ValueError(f"traces must hold a prompt at {args.at} and another temperature")
    temperatures = sorted(set.intersection(*(set(g) for g in wanted)))
    rows = []
    for drawn_at in (None, *temperatures):
        results = [one(g, drawn_at, args) for g in wanted]
        rows.append({
            "history at": "none" if drawn_at is None else drawn_at,
            "tau": tau(results),
            "interval": interval(lambda p, r=results: tau([r[i] for i in p]), len(results)),
            "steps": sum(r.steps for r in results),
        })  # fmt: skip
    print(table([r | {"interval": "{:.2f}-{:.2f}".format(*r["interval"])} for r in rows]))
    finish({"bench": "history_drift", "at": args.at, "nodes": args.nodes,
            "samples": args.samples, "problems": len(wanted), "rows": rows}, args.json)  # fmt: skip


def one(group: dict[float, Trace], drawn_at: float | None, args: argparse.Namespace) -> Replayed:
    live, n = group[args.at], args.samples
    history = []
    if drawn_at is not None:
        source = group[drawn_at]
        first = n if drawn_at == args.at else 0
        history = [Earlier.of(s) for s in source.samples[first : first + n]]
    drafter = ConsensusGraph(reference(), "cpu", history=bool(history))
    shown = replace(live, samples=live.samples[:n], top=live.top and live.top[:n])
    return replay(shown, drafter, n, args.nodes, history=history)


if __name__ == "__main__":
    main()
