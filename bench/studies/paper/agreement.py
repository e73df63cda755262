"""tau with reduced consensus: hotter samples, foreign siblings, fewer samples."""

from dataclasses import replace

from bench.studies.drafting.replay import make
from bench.studies.paper.box import Box
from bench.studies.paper.measure import figures, likeness, mean, replayed
from bench.studies.paper.record_study import TEMPERATURES
from csd.evaluate.replay import replay
from csd.traces.traces import Trace

DRAFTERS = ("consensus", "paper", "paper-shrinking-tree", "rest", "trie-prompt", "prompt-lookup")
SAMPLES, NODES = 8, 8


def run(box: Box) -> None:
    largest = 4 if box.quick else 32
    cases = [("temperature", t) for t in TEMPERATURES]
    cases += [("foreign", n) for n in (0, 2, 4, 6, 7)]
    cases += [("samples", n) for n in (1, 2, 4, 8, 16, 32)]
    if box.quick:
        cases = [("temperature", 1.3), ("foreign", 3), ("samples", 2)]
    warm = box.recorded("sums/", "@0.7")
    done = {(r["what"], r["value"], r["drafter"]) for r in box.rows}
    for i, (what, value) in enumerate(cases):
        if box.left < 0:
            box.cut_short = True
            box.notes.append(f"{cases[i:]} left out: no time left")
            return
        traces = box.recorded("sums/", f"@{value}") if what == "temperature" else warm
        n = min(value if what == "samples" else SAMPLES, largest)
        alike = mean([likeness(t.samples[:n]) for t in traces])
        for drafter in DRAFTERS:
            if (what, value, drafter) in done:
                continue
            if what == "foreign":
                measured = own_tau(traces, drafter, min(value, n - 1), n)
            else:
                measured = figures(replayed(traces, drafter, n, NODES))
            box.add(what=what, value=value, drafter=drafter, prefix=alike["prefix"], **measured)


def own_tau(traces: list[Trace], drafter: str, foreign: int, samples: int) -> dict:
    """tau of a prompt's own samples if `foreign` of their siblings answer other prompts."""
    tokens = steps = 0
    for i, trace in enumerate(traces):
        # each turn has other samples of the same problem
        for turn in range(0, len(trace.samples), samples):
            own = range(turn, turn + samples - foreign)
            if own[-1] >= len(trace.samples):
                break
            others = [traces[(i + 1 + j) % len(traces)] for j in range(foreign)]
            if foreign and len(traces) == 1:
                raise ValueError("traces must hold at least two problems, got 1")
            mixed = replace(
                trace,
                samples=[trace.samples[j] for j in own] + [t.samples[turn] for t in others],
                top=trace.top and [trace.top[j] for j in own] + [t.top[turn] for t in others],
            )
            watch = Watch(make(drafter, traces, trace.problem), len(own))
            replay(mixed, watch, samples, NODES)
            tokens += sum(len(trace.samples[j]) for j in own)
            steps += watch.steps
    return {"tau": tokens / steps}


class Watch:
    """Wrapper of a drafter that counts the steps of the first `count` samples."""

    def __init__(self, drafter, count: int):
        self._drafter, self._count, self.steps = drafter, count, 0
        self.context = drafter.context
        self.observe_prompt, self.insert = drafter.observe_prompt, drafter.insert

    def propose(self, slots, rows, noise=None):
        self.steps += int(slots.live[: self._count].sum())
        return self._drafter.propose(slots, rows, noise)
