"""The distribution of a step's nodes over samples, and the reliability of their probabilities.

    python -m bench.allocation TRACES [--samples 16] [--nodes 16] [--json F] [--plot P]

Replays of the consensus graph with another rule for the nodes of a step, beside the rule as it is:
the likeliest of all live samples, `nodes` for each of these. Also the share of drafted
paths that was accepted, by the probability they were drafted with.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from bench.common import finish, table
from bench.replay import tau
from csd.evaluate.replay import Replayed, replay
from csd.graph.consensus import ConsensusGraph
from csd.kernels.ops import reference
from csd.state.pool import COST_ONE, PACE, Pool, acceptance, path_probability, trim
from csd.state.slots import Slots
from csd.state.verdict import Verdict
from csd.traces.traces import Trace, read_traces

# a bin of path probability for each halving, and one for all that is below
BINS = 8


class Watched(ConsensusGraph):
    """The graph, and how many of its nodes were expected and how many came true, by bin."""

    def __init__(self) -> None:
        super().__init__(reference(), torch.device("cpu"))
        self.drafted = [0] * BINS
        self.expected = [0.0] * BINS
        self.calibrated = [0.0] * BINS
        self.true = [0] * BINS

    def insert(self, pool: Pool, slots: Slots, verdict: Verdict) -> None:
        # replays give what they drew to the rows of a path that came true, and -1 to the others
        true = (verdict.sample >= 0).tolist()
        rows = zip(pool.depth.tolist(), pool.cost.tolist(), true, strict=True)
        for depth, cost, came in rows:
            if depth:
                at = min(cost // COST_ONE, BINS - 1)
                self.drafted[at] += 1
                self.expected[at] += path_probability(cost)
                self.calibrated[at] += acceptance(cost)
                self.true[at] += came
        super().insert(pool, slots, verdict)


class Wary(ConsensusGraph):
    """Fewer nodes for samples whose drafts came true less often than expected in the last steps."""

    def __init__(self, fade: float = 0.7):
        super().__init__(reference(), torch.device("cpu"))
        self.fade = fade

    def start(self, group_key: int, prompt: list[int], slots: Slots) -> None:
        super().start(group_key, prompt, slots)
        self.hoped = torch.full((slots.count,), 2.0)
        self.came = self.hoped.clone()

    def propose(self, slots: Slots, rows: int, noise: Any = None, nodes: Any = None) -> Pool:
        live = int(slots.live.sum())
        pool = super().propose(slots, live + 2 * (rows - live), noise)
        doubt = ((self.hoped / self.came).log2().clamp(0, 4) * COST_ONE).int()
        owner = pool.slot.clamp(min=0).long()
        pool.cost += torch.where(pool.depth > 0, doubt[owner], 0)
        return trim(pool, rows)

    def insert(self, pool: Pool, slots: Slots, verdict: Verdict) -> None:
        chance = torch.tensor([path_probability(cost) for cost in pool.cost.tolist()])
        hoped = torch.where(pool.depth > 0, chance, 0)
        new = torch.zeros_like(self.hoped)
        new.index_add_(0, pool.slot.clamp(min=0).long(), hoped)
        self.hoped = self.fade * self.hoped + new + 0.1
        self.came = self.fade * self.came + (verdict.accept_count - 1).clamp(min=0) + 0.1
        super().insert(pool, slots, verdict)


class Later(ConsensusGraph):
    """A graph that holds the tokens of earlier samples, for the samples from `first` on."""

    def __init__(self, earlier: ConsensusGraph, first: int):
        super().__init__(reference(), torch.device("cpu"))
        self.table, self.first = earlier.table, first

    def start(self, group_key: int, prompt: list[int], slots: Slots) -> None:
        slots.sample += self.first


def in_waves(trace: Trace, samples: int, nodes: int, waves: int) -> list[Replayed]:
    """The samples in so many parts, each begun when the one before has ended."""
    size = samples // waves
    drafter = ConsensusGraph(reference(), torch.device("cpu"))
    results = []
    for first in range(0, samples, size):
        part = slice(first, first + size)
        top = trace.top[part] if trace.top else None
        wave = Trace(trace.problem, trace.prompt, trace.samples[part], trace.temperature, top)
        results.append(replay(wave, drafter, size, nodes, seed=first))
        drafter = Later(drafter, first + size)
    return results


def plain(**options: Any) -> Any:
    def run(trace: Trace, samples: int, nodes: int) -> list[Replayed]:
        drafter = ConsensusGraph(reference(), torch.device("cpu"))
        return [replay(trace, drafter, samples, nodes, **options)]

    return run


RULES = {
    "as it is": plain(),
    "survivors get the nodes of samples that ended": plain(share=True),
    "the same, and samples that are behind get more": plain(share=True, pace=PACE),
    "samples whose drafts fail get fewer": lambda t, n, k: [replay(t, Wary(), n, k)],
    "half of the samples run ahead": lambda t, n, k: in_waves(t, n, k, 2),
    "a quarter at a time": lambda t, n, k: in_waves(t, n, k, 4),
}


def rules(traces: list[Trace], samples: int, nodes: int) -> list[dict]:
    """A row each. steps: until a problem's last sample ends, summed over problems; waves one after
    another, as when other prompts fill the rest of the batch."""
    rows = []
    for name, run in RULES.items():
        found = [r for trace in traces for r in run(trace, samples, nodes)]
        rows.append({
            "rule": name,
            "tau": tau(found),
            "ratio": tau(found) / rows[0]["tau"] if rows else 1.0,
            "steps": sum(r.steps for r in found),
            "nodes a sample and step": sum(r.nodes for r in found)
            / sum(r.sample_steps for r in found),
        })  # fmt: skip
    return rows


def reliability(traces: list[Trace], samples: int, nodes: int) -> list[dict]:
    """A row a bin of path probability: its mean, what budgets expect, what share came true."""
    seen = [Watched() for _ in traces]
    for trace, drafter in zip(traces, seen, strict=True):
        replay(trace, drafter, samples, nodes)
    rows = []
    for i in range(BINS):
        names = ("drafted", "expected", "calibrated", "true")
        drafted, expected, calibrated, true = (sum(getattr(x, n)[i] for x in seen) for n in names)
        if drafted:
            least = f"{2.0 ** -(i + 1):.3g}" if i < BINS - 1 else "0"
            rows.append({
                "path probability from": least,
                "nodes": drafted,
                "expected": expected / drafted,
                "calibrated": calibrated / drafted,
                "true": true / drafted,
            })  # fmt: skip
    return rows


def plot(found: dict, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, both = plt.subplots(1, 2, figsize=(9, 4.5), sharey=True)
    titles = {"expected": "path probability, as drafted", "calibrated": "as budgets read it"}
    for ax, (key, title) in zip(both, titles.items(), strict=True):
        for name, part in found.items():
            rows = part["reliability"]
            ax.plot([r[key] for r in rows], [r["true"] for r in rows], marker="o", label=name)
        ax.plot([0.005, 1], [0.005, 1], color="gray", linewidth=0.8)
        ax.set(xscale="log", yscale="log", xlabel=title)
        ax.grid(alpha=0.3)
    both[0].set(ylabel="share of paths that came true")
    both[0].legend(fontsize=7)
    fig.tight_layout()
    fig.savefig(path, dpi=90)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--problems", type=int, help="the first so many of each file")
    parser.add_argument("--json")
    parser.add_argument("--plot", help="of reliability; needs matplotlib")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = {}
    if args.json and Path(args.json).exists():
        # the parts of files that are not replayed now stay
        old = json.loads(Path(args.json).read_text())
        parts = {name: part for name, part in old.items() if isinstance(part, dict)}
        found = {name: part for name, part in parts.items() if "reliability" in part}
    for path in args.traces:
        traces = list(read_traces(path))[: args.problems]
        samples = min(args.samples, *(len(t.samples) for t in traces))
        name = Path(path).name.split(".jsonl")[0]
        given = traces, samples, args.nodes
        found[name] = {
            "samples": samples, "problems": len(traces), "rules": rules(*given),
            "reliability": reliability(*given),
        }  # fmt: skip
        print(f"{name}, {samples} samples")
        print(table(found[name]["rules"]))
        print(table(found[name]["reliability"]), flush=True)
    if args.plot:
        plot(found, args.plot)
    finish({"bench": "allocation", "nodes": args.nodes, **found}, args.json)


if __name__ == "__main__":
    main()
