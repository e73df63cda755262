"""Figures of a replay, and similarity of a set of samples."""

import math
from collections import Counter
from collections.abc import Callable
from itertools import combinations

from bench.lib.common import interval
from bench.studies.drafting.replay import make, tau
from csd.engine.traces.traces import Trace
from csd.evaluate.answers import answer_of
from csd.evaluate.replay import Replayed, replay

# a run this long hardly repeats by chance
RUN = 12


def replayed(
    traces: list[Trace], drafter: str | Callable, samples: int, nodes: int, **options
) -> list[Replayed]:
    """One replay a trace. drafter: a name that `bench replay` takes, or a function."""
    found = []
    for trace in traces:
        new = make(drafter, traces, trace.problem) if isinstance(drafter, str) else drafter()
        found.append(replay(trace, new, samples, nodes, **options))
    return found


def figures(results: list[Replayed]) -> dict:
    """tau with its 95% interval over problems; as papers of drafters report: accepted drafts a
    sample and step, their share of the nodes, these, and microseconds of a sample's draft."""
    nodes, steps = sum(r.nodes for r in results), sum(r.sample_steps for r in results)
    accepted = sum(sum(r.sources[1:]) for r in results)
    low, high = interval(lambda pick: tau([results[i] for i in pick]), len(results), 1000)
    return {
        "tau": tau(results),
        "low": low,
        "high": high,
        "length": accepted / steps,
        "accepted": accepted / max(nodes, 1),
        "nodes": nodes / steps,
        "draft_microseconds": 1e6 * sum(r.propose_seconds for r in results) / steps,
    }


def likeness(samples: list[list[int]], texts: list[str] | None = None) -> dict:
    """Likeness of a prompt's samples.

    distinct: different samples; prefix: tokens that two of them share from the start, the mean over
    pairs; runs: the share of a sample's runs of RUN tokens that one of the others has too; with
    texts also answers: different ones, and entropy: of the answers, in bits.
    """
    found = {
        "distinct": len({tuple(s) for s in samples}),
        "prefix": sum(_shared(a, b) for a, b in combinations(samples, 2))
        / max(math.comb(len(samples), 2), 1),
        "runs": _shared_runs(samples),
    }
    if texts is not None:
        counts = Counter(answer_of(t) for t in texts)
        share = [c / len(texts) for c in counts.values()]
        found |= {"answers": len(counts), "entropy": sum(-p * math.log2(p) for p in share)}
    return found


def mean(rows: list[dict]) -> dict:
    """The mean of each figure over rows with the same ones."""
    return {name: sum(r[name] for r in rows) / len(rows) for name in rows[0]}


def _shared_runs(samples: list[list[int]]) -> float:
    runs = [{tuple(s[i : i + RUN]) for i in range(len(s) - RUN + 1)} for s in samples]
    owners = Counter(run for of_one in runs for run in of_one)
    return sum(c for c in owners.values() if c > 1) / max(sum(map(len, runs)), 1)


def _shared(a: list[int], b: list[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
