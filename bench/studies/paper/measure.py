"""Figures of a replay, and similarity of a set of samples."""

import math
from collections import Counter
from collections.abc import Callable
from itertools import combinations

from bench.lib.common import interval
from bench.studies.drafting.replay import make, tau
from csd.evaluate.answers import answer_of
from csd.evaluate.replay import Replayed, replay
from csd.traces.traces import Trace

# a run of this many tokens hardly repeats by chance
RUN = 12


def replayed(
    traces: list[Trace], drafter: str | Callable, samples: int, nodes: int, **options
) -> list[Replayed]:
    """Replay each trace. drafter: a name of `bench replay`, or a function that makes one."""
    results = []
    for trace in traces:
        new = make(drafter, traces, trace.problem) if isinstance(drafter, str) else drafter()
        results.append(replay(trace, new, samples, nodes, **options))
    return results


def figures(results: list[Replayed]) -> dict:
    """tau with its 95% interval over problems, and figures as in papers on drafters.

    length: accepted drafts per sample and step; accepted: their share of the nodes; nodes: per
    sample and step; draft_microseconds: per sample's draft.
    """
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
    """Similarity of a prompt's samples.

    distinct: number of different samples; prefix: common first tokens, the mean over pairs; runs:
    share of a sample's runs of RUN tokens that another sample also has; with texts also answers:
    number of different answers, and entropy: of the answers, in bits.
    """
    similarity = {
        "distinct": len({tuple(s) for s in samples}),
        "prefix": sum(_shared(a, b) for a, b in combinations(samples, 2))
        / max(math.comb(len(samples), 2), 1),
        "runs": _shared_runs(samples),
    }
    if texts is not None:
        counts = Counter(answer_of(t) for t in texts)
        share = [c / len(texts) for c in counts.values()]
        similarity |= {"answers": len(counts), "entropy": sum(-p * math.log2(p) for p in share)}
    return similarity


def mean(rows: list[dict]) -> dict:
    """Mean of each figure over rows, which have the same keys."""
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
