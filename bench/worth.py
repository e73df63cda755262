"""What a budget gains by knowing how often nodes of a path probability come true.

    python -m bench.worth TRACES [--samples 8] [--nodes 16] [--problems 10] [--json F]

Replays of the consensus graph. Of the nodes of each step a budget keeps so many of the likeliest
that (live + c sum of p) / (1 + slope rows / live) is highest, as `csd.engine.budget` does, with c
learned from the steps before. p is the path probability, or `csd.state.pool.acceptance`. What is
reported is tokens by time, 1 without drafts. Samples go on as if all nodes had been verified.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bench.common import merged, table, write
from csd.evaluate.replay import replay
from csd.graph.consensus import ConsensusGraph
from csd.kernels.ops import reference
from csd.state.pool import Pool, acceptance, path_probability
from csd.state.slots import Slots
from csd.state.verdict import Verdict
from csd.traces.traces import Trace, read_traces

# what a drafted row of each live slot adds to a step's time
SLOPES = (0.01, 0.03, 0.08, 0.2)


class Steps(ConsensusGraph):
    """The graph, and of each step the nodes' costs, rising, which came true, and its live slots."""

    def __init__(self) -> None:
        super().__init__(reference(), torch.device("cpu"))
        self.steps: list[tuple[list[int], np.ndarray, int]] = []

    def insert(self, pool: Pool, slots: Slots, verdict: Verdict) -> None:
        drafted = pool.depth > 0
        cost, order = pool.cost[drafted].sort(stable=True)
        # replays give what they drew to the rows of a path that came true, and -1 to the others
        true = (verdict.sample[drafted] >= 0)[order]
        roots = int(((pool.depth == 0) & (pool.slot >= 0)).sum())
        self.steps.append((cost.tolist(), true.numpy(), roots))
        super().insert(pool, slots, verdict)


def recorded(traces: list[Trace], samples: int, nodes: int) -> list[list]:
    """The steps of each problem."""
    drafters = [Steps() for _ in traces]
    for trace, drafter in zip(traces, drafters, strict=True):
        replay(trace, drafter, samples, nodes)
    return [drafter.steps for drafter in drafters]


def tokens_by_time(problems: list[list], slope: float, p: Callable[[int], float]) -> float:
    """Of all problems, with a budget that begins anew with each."""
    tokens = seconds = 0.0
    for steps in problems:
        # as `csd.engine.budget.Calibration`
        expected = accepted = 4.0
        for costs, true, live in steps:
            worth = np.array([0.0, *map(p, costs)]).cumsum()
            took = 1 + slope * np.arange(len(worth)) / live
            kept = int(((live + accepted / expected * worth) / took).argmax())
            fade = 1 - min(worth[kept], 50.0) / 100
            expected = expected * fade + worth[kept]
            accepted = accepted * fade + true[:kept].sum()
            tokens += live + true[:kept].sum()
            seconds += live * took[kept]
    return tokens / seconds


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--problems", type=int, help="the first so many of each file")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows, start = [], time.time()
    for path in args.traces:
        traces = list(read_traces(path))[: args.problems]
        samples = min(args.samples, *(len(t.samples) for t in traces))
        problems = recorded(traces, samples, args.nodes)
        for slope in SLOPES:
            before = tokens_by_time(problems, slope, path_probability)
            after = tokens_by_time(problems, slope, acceptance)
            rows.append({
                "trace": Path(path).name.split(".jsonl")[0], "problems": len(traces),
                "slope": slope, "path probability": before, "acceptance": after,
                "ratio": after / before,
            })  # fmt: skip
        print(table(rows[-len(SLOPES) :]), flush=True)
    if args.json and Path(args.json).exists():
        old = json.loads(Path(args.json).read_text())["rows"]
        rows = merged(old, rows, ("trace", "slope"))
    result = {"nodes": args.nodes, "samples": args.samples, "seconds": time.time() - start}
    write(result | {"rows": rows}, args.json, indent=1)


if __name__ == "__main__":
    main()
