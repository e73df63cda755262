"""Tables of drafting.md that replays of recorded samples give."""

from bench.lib.common import markdown
from bench.studies.drafting.replay_rows import metrics, ratio, tables
from tools.experiment_tables.results import CLASSEVAL, GSM8K, MATH, load, only

COPYING = {
    "rewrite": ("rewrite", 8),
    "ClassEval": (CLASSEVAL, 5),
    "GSM8K": (GSM8K, 8),
    "MATH": (MATH, 8),
}
DRAFTERS = {
    "suffix tree": "suffix-tree",
    "trie, given the prompt": "trie-prompt",
    "consensus": "consensus",
}


def drafters() -> str:
    return "\n\n".join(tables(load("replay")["rows"]))


def _rows() -> list[dict]:
    return load("replay_copying")["rows"] + load("replay_deeper")["rows"]


def copying() -> str:
    rows = _rows()

    def record(drafter: str, trace: str, nodes: int) -> dict:
        name, samples = COPYING[trace]
        return only(rows, drafter=drafter, trace=name, samples=samples, nodes=nodes)

    def both(cell) -> list[str]:
        return [f"{cell(trace, 16)}; {cell(trace, 8)}" for trace in COPYING]

    def over(trace: str, nodes: int, first: int, step: int) -> str:
        ours, theirs = (record(d, trace, nodes) for d in ("consensus", "trie-prompt"))
        count = len(ours["by_problem"]["problem"])
        return f"{ratio(ours, theirs, range(first, count, step)):.3f}"

    lines = [
        [label, *both(lambda t, n, d=drafter: f"{record(d, t, n)['tau']:.2f}")]
        for label, drafter in DRAFTERS.items()
    ]
    halves = {
        "its ratio to the trie": (0, 1),
        "of every second problem": (0, 2),
        "of the other ones": (1, 2),
    }
    for label, (first, step) in halves.items():
        lines.append([label, *both(lambda t, n, f=first, s=step: over(t, n, f, s))])
    return markdown(["16 nodes; 8 nodes", *COPYING], lines)


def copying_metrics() -> str:
    rows = _rows()
    lines = [
        [
            drafter,
            *(
                metrics(only(rows, drafter=drafter, trace=t, samples=s, nodes=16))
                for t, s in COPYING.values()
            ),
        ]
        for drafter in DRAFTERS.values()
    ]
    return markdown(["tau, 16 nodes", *COPYING], lines)


TABLES = {"drafters": drafters, "copying": copying, "copying_metrics": copying_metrics}
