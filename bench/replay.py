"""Replay traces with several drafters: tokens a step, nodes, microseconds, where tokens came from.

python -m bench.replay TRACES --drafters consensus prompt-lookup --samples 8 --nodes 4 16 --json F

Samples of a problem advance together; a step drafts at most `nodes` tokens a live sample, without
the roots. tau is tokens committed per sample and step, with the 95% interval of a bootstrap over
problems; the ratio to the best other drafter has its own, over the same problems. Beside it, as
papers of drafters report: accepted drafted tokens per sample and step (length), their share of the
drafted nodes (accept), and the drafter's time for one sample's draft (draft, microseconds), which
is without inserting.
"""

import argparse
import random
import time
from dataclasses import asdict
from pathlib import Path

import torch

from bench.common import finish, write
from bench.rivals import RIVALS, make_rival
from csd.engine.draft_trees import SOURCES
from csd.evaluate.replay import Replayed, replay
from csd.graph.make_drafter import DRAFTERS, make_drafter
from csd.kernels.ops import reference
from csd.traces.traces import Trace, read_traces

# variants of csd's own drafter that show what a part of it is worth
ABLATIONS = ("consensus-uncoupled", "consensus-counts")


def make(name: str, traces: list[Trace], problem) -> object:
    """A new drafter; one that reads a datastore gets the other problems of the traces."""
    if name in RIVALS:
        return make_rival(name, [t for t in traces if t.problem != problem])
    return make_drafter(name, reference(), torch.device("cpu"))


def run(name, traces, samples, nodes, share=False, seed=0, others=None) -> list[Replayed]:
    """One drafter over all problems; `others` are the traces that a datastore may hold."""
    base = "consensus" if name in ABLATIONS else name
    out = []
    for trace in traces:
        drafter = make(base, others or traces, trace.problem)
        if name == "consensus-counts":
            trace = Trace(trace.problem, trace.prompt, trace.samples, trace.temperature, None)
        coupled = name not in ABLATIONS
        out.append(replay(trace, drafter, samples, nodes, share=share, coupled=coupled, seed=seed))
    return out


def tau(results: list[Replayed]) -> float:
    return sum(r.tokens for r in results) / sum(r.sample_steps for r in results)


def interval(statistic, count: int, draws: int = 2000) -> tuple[float, float]:
    """95% bootstrap interval of statistic(list of problem indices)."""
    rng = random.Random(0)
    found = sorted(statistic(rng.choices(range(count), k=count)) for _ in range(draws))
    return found[int(0.025 * draws)], found[int(0.975 * draws)]


def summary(name: str, results: list[Replayed], samples: int, nodes: int) -> dict:
    def total(field):
        return sum(getattr(r, field) for r in results)

    tokens, steps, each = total("tokens"), total("steps"), total("sample_steps")
    accepted = sum(sum(r.sources[1:]) for r in results)
    sources = [sum(r.sources[i] for r in results) / tokens for i in range(len(SOURCES))]
    return {
        "drafter": name,
        "samples": samples,
        "nodes": nodes,
        "tau": tau(results),
        "interval": interval(lambda pick: tau([results[i] for i in pick]), len(results)),
        "nodes_used": total("nodes") / total("sample_steps"),
        "accepted_length": accepted / each,
        "acceptance": accepted / max(total("nodes"), 1),
        "draft_microseconds": 1e6 * total("propose_seconds") / each,
        "microseconds": 1e6 * (total("propose_seconds") + total("insert_seconds")) / steps,
        "makespan": steps,
        "plain_makespan": total("plain_steps"),
        "sources": dict(zip(("target", *SOURCES[1:]), sources, strict=True)),
        "problems": len(results),
    }


def against(ours: list[Replayed], others: dict[str, list[Replayed]]) -> dict:
    """tau of `ours` over that of the best other drafter."""
    best = max(others, key=lambda name: tau(others[name]))
    theirs = others[best]

    def ratio(pick):
        return tau([ours[i] for i in pick]) / tau([theirs[i] for i in pick])

    return {
        "best_other": best,
        "ratio": ratio(range(len(ours))),
        "ratio_interval": interval(ratio, len(ours)),
    }


def table(rows: list[dict]) -> str:
    lines = [
        f"{'trace':28} {'drafter':20} {'N':>3} {'K':>3} {'tau':>6} {'95%':>13} {'nodes':>6} "
        f"{'length':>6} {'accept':>6} {'draft':>7} "
        f"{'us/step':>8} {'steps':>6} {'own':>5} {'sibl':>5} {'prom':>5}  ratio to best other"
    ]
    for r in rows:
        low, high = r["interval"]
        line = (
            f"{r['trace'][:28]:28} {r['drafter']:20} {r['samples']:3} {r['nodes']:3} "
            f"{r['tau']:6.3f} {low:6.3f}-{high:6.3f} {r['nodes_used']:6.2f} "
            f"{r['accepted_length']:6.3f} {r['acceptance']:6.1%} {r['draft_microseconds']:7.0f} "
            f"{r['microseconds']:8.0f} {r['makespan']:6}"
            + "".join(f" {r['sources'][s]:5.2f}" for s in ("own", "sibling", "prompt"))
        )
        if "ratio" in r:
            low, high = r["ratio_interval"]
            line += f"  {r['ratio']:.3f} ({low:.3f}-{high:.3f}) {r['best_other']}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+")
    parser.add_argument(
        "--drafters",
        nargs="+",
        default=["consensus", "prompt-lookup"],
        choices=[*DRAFTERS, *ABLATIONS, *RIVALS],
        metavar="NAME",
    )
    parser.add_argument("--samples", type=int, nargs="+", default=[8])
    parser.add_argument("--nodes", type=int, nargs="+", default=[16])
    parser.add_argument("--problems", type=int, help="the first so many of each file")
    parser.add_argument("--skip", type=int, default=0, help="without these first ones")
    parser.add_argument(
        "--share", action="store_true", help="samples that ended leave their nodes to the others"
    )
    parser.add_argument("--without-top", action="store_true", help="ignore recorded probabilities")
    parser.add_argument("--seed", type=int, default=0, help="of the posterior noise")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, start = [], time.time()
    for path in args.traces:
        traces = list(read_traces(path))
        if args.without_top:
            for trace in traces:
                trace.top = None
        stop = None if args.problems is None else args.skip + args.problems
        # a datastore has the problems that are not replayed too
        others, traces = traces, traces[args.skip : stop]
        recorded = min(len(t.samples) for t in traces)
        for samples in args.samples:
            if samples > recorded:
                continue
            for nodes in args.nodes:
                found = {
                    name: run(name, traces, samples, nodes, args.share, args.seed, others)
                    for name in args.drafters
                }
                rivals = {n: r for n, r in found.items() if not n.startswith("consensus")}
                for name, results in found.items():
                    row = {"trace": Path(path).stem} | summary(name, results, samples, nodes)
                    if name == "consensus" and rivals:
                        row |= against(results, rivals)
                    row["by_problem"] = [asdict(r) | {"rows": len(r.rows)} for r in results]
                    rows.append(row)
                print(table(rows[-len(found) :]), flush=True)
    result = {"share": args.share, "seed": args.seed, "seconds": time.time() - start}
    write(result | {"rows": rows}, args.json, indent=1)
    for row in rows:
        del row["by_problem"]
    finish(result | {"rows": rows})


if __name__ == "__main__":
    main()
