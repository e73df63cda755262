"""Tasks other than mathematics, and texts with little agreement, for each drafter at equal nodes.

SmolLM2's answers to our own prompts: code, common sense, medical multiple choice, open writing at
temperature 0.7; open writing at 1.3, where samples have almost nothing in common.
"""

from dataclasses import replace

from bench.studies.paper.box import Box
from bench.studies.paper.measure import figures, likeness, mean, replayed
from bench.studies.paper.record_study import TASKS

DRAFTERS = (
    "consensus",
    "consensus-counts",
    "paper",
    "paper-shrinking-tree",
    "rest",
    "trie-prompt",
    "prompt-lookup",
)
SETS = [(task, 0.7) for task in TASKS] + [("writing", 1.3)]
SAMPLES = 8


def run(box: Box) -> None:
    cases = [(task, t, k) for k in (8, 4, 16) for task, t in SETS]
    if box.quick:
        cases = [("writing", 1.3, 4), ("medical", 0.7, 4)]
    for task, temperature, nodes in box.while_time("settings", cases):
        traces = box.recorded(f"{task}/", f"@{temperature}")
        alike = mean([likeness(t.samples) for t in traces])
        for drafter in DRAFTERS:
            base, known = drafter, traces
            if drafter == "consensus-counts":
                # without the target's probabilities, like a server's log
                base = "consensus"
                known = [_without_top(t) for t in traces]
            measured = figures(replayed(known, base, SAMPLES, nodes))
            box.add(
                task=task,
                temperature=temperature,
                K=nodes,
                drafter=drafter,
                prompts=len(traces),
                prefix=alike["prefix"],
                **measured,
            )


def _without_top(trace):
    return replace(trace, top=None)
