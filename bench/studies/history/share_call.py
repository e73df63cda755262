"""Gain of `share="call"` for recorded samples, which the engine draws from a queue of prompts.

    python -m bench share_call TRACES [--samples 1 4 8] [--slots 8] [--nodes 8] [--problems 30]
        [--json F]

The prompts of a file are one call, with the engine's own order and `together`; a prompt's graph
gets only those samples of others that had finished when it was admitted. `--together-files` also
puts all files into one call, whose prompts alternate, as an example of prompts with little in
common; the files must have the same tokenizer. An existing result file is completed: other calls
are kept.

    tau       tokens per sample and step; `ratio` to the call without sharing, with the 95%
              interval of a bootstrap over prompts
    steps     of the whole batch, until the last sample ended
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path

import torch

from bench.lib.common import finish, interval, table
from bench.studies.drafting.queue import drawn
from csd.engine.requests import Request
from csd.engine.traces.traces import Trace, read_traces


def tau(requests: Sequence[Request]) -> float:
    tokens, steps = zip(*((r.stats.tokens, r.stats.sample_steps) for r in requests), strict=True)
    return sum(tokens) / sum(steps)


def first(trace: Trace, samples: int) -> Trace:
    """Returns the trace with its first `samples` samples only."""
    tops, indices = (x and x[:samples] for x in (trace.top, trace.indices))
    return replace(trace, samples=trace.samples[:samples], top=tops, indices=indices)


def compare(traces: list[Trace], samples: int, slots: int, nodes: int) -> dict:
    """Returns a row that compares one call without sharing to one with it."""
    traces = [first(t, samples) for t in traces]
    alone, before, _ = drawn(traces, slots, None, nodes)
    shared, after, dropped = drawn(traces, slots, None, nodes, share=True)

    def ratio(pick: Sequence[int]) -> float:
        return tau([shared[i] for i in pick]) / tau([alone[i] for i in pick])

    everyone = range(len(traces))
    return {
        "samples": samples,
        "slots": slots,
        "prompts": len(traces),
        "tau": tau(alone),
        "shared": tau(shared),
        "ratio": ratio(everyone),
        "interval": interval(ratio, len(traces)),
        "steps": len(before.live),
        "steps shared": len(after.live),
        "tokens told": sum(r.stats.shared_tokens for r in shared) / len(shared),
        "contexts left out": dropped,
    }


def shown(row: dict) -> dict:
    return row | {"interval": "{:.2f}-{:.2f}".format(*row["interval"])}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--slots", type=int, nargs="+", default=[8])
    parser.add_argument("--nodes", type=int, default=8, help="drafted tokens a slot and step")
    parser.add_argument("--problems", type=int, help="the first so many of each file")
    parser.add_argument("--together-files", action="store_true", help="one call of all files too")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    calls = {
        Path(p).name.split(".jsonl")[0]: list(read_traces(p))[: args.problems] for p in args.traces
    }
    if args.together_files:
        in_turn = chain(*zip_longest(*calls.values()))
        calls[" and ".join(calls)] = [t for t in in_turn if t is not None]
    found: dict[str, list] = {}
    if args.json and Path(args.json).exists():
        found = json.loads(Path(args.json).read_text())["rows"]
    for name, traces in calls.items():
        most = min(len(t.samples) for t in traces)
        fits = sorted({min(n, most) for n in args.samples})
        found[name] = [compare(traces, n, s, args.nodes) for n in fits for s in args.slots]
        print(name, table([shown(row) for row in found[name]]), sep="\n", flush=True)
        finish({"bench": "share_call", "nodes": args.nodes, "rows": found}, args.json)


if __name__ == "__main__":
    main()
