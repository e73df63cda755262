"""Tables of paper.md."""

from statistics import median
from typing import Any

from bench.lib.common import markdown
from bench.studies.eagle import eagle_tables
from tools.experiment_tables.results import GSM8K, MATH, between, load, only

TRACES = {"word problems": "sums", "GSM8K": GSM8K, "MATH": MATH}
# row: the knob that is turned, and its value
STRICTNESS: dict[str, tuple[str, float]] = {
    "k = 2, eps = 0": ("k", 2),
    "k = 4": ("k", 4),
    "k = 6": ("k", 6),
    'k = 4, eps = 1: `drafter="paper"`': ("eps, k = 4", 1),
    "k = 4, eps = 2": ("eps, k = 4", 2),
    "k = 6, eps = 1": ("eps, k = 6", 1),
    "k = 6, eps = 2": ("eps, k = 6", 2),
    "k = 4, eps = 1, alpha 0": ("alpha", 0.0),
    "alpha 1": ("alpha", 1.0),
    "shrinking: k = 4, then fewer": ("k, shrinking", 4),
    "k = 1": ("k, shrinking", 1),
    "k = 6, then fewer": ("eps, shrinking", 0),
    "k = 6, 1 edit": ("eps, shrinking", 1),
    "k = 6, 2 edits": ("eps, shrinking", 2),
    "minimum weight 0.6": ("least, shrinking", 0.6),
    "0.8": ("least, shrinking", 0.8),
    "1 sibling of 7": ("siblings, shrinking", 1),
    "2 siblings": ("siblings, shrinking", 2),
    "4 siblings": ("siblings, shrinking", 4),
}
DRAFTERS = ("consensus", "paper", "paper-shrinking-tree", "rest", "trie-prompt", "prompt-lookup")
NAMES = {
    "paper's tree, loose": "paper's tree, k shrinking, loose",
    "paper's tree, strict": "paper's tree, k shrinking, strict",
}
TASKS = (("code", 0.7), ("commonsense", 0.7), ("medical", 0.7), ("writing", 0.7), ("writing", 1.3))


def _rows(section: str) -> list[dict]:
    return load("study")["sections"][section]["rows"]


def strictness() -> str:
    rows = _rows("strictness")

    def cell(knob: str, value: float, trace: str) -> str:
        both = (
            only(rows, trace=trace, drafter=d, knob=knob, value=value) for d in ("chain", "tree")
        )
        return "; ".join(f"{r['tau']:.2f} / {r['nodes']:.1f}" for r in both)

    lines = [
        [label, *(cell(*at, trace) for trace in TRACES.values())]
        for label, at in STRICTNESS.items()
    ]
    return markdown(["chain; tree", *TRACES], lines)


def diversity() -> str:
    lines = [
        [
            NAMES.get(r["verifier"], r["verifier"]),
            f"{r['tau']:.2f}",
            f"{r['equal_to_plain']:.0%}",
            f"{r['distinct']:.2f}",
            f"{r['prefix']:.2f}",
            f"{r['runs']:.3f}",
            f"{r['answers']:.2f}",
            f"{r['entropy']:.2f}",
        ]
        for r in _rows("diversity")
    ]
    head = [
        "",
        "tau",
        "samples equal to plain",
        "distinct of 8",
        "prefix",
        "runs",
        "answers",
        "entropy, bits",
    ]
    return markdown(head, lines)


def _metrics(row: dict) -> str:
    return (
        f"{row['tau']:.2f} / {row['length']:.2f} / {row['accepted']:.1%} / {row['nodes']:.1f} / "
        f"{row['draft_microseconds']:.0f}"
    )


def _agreement(first: str, what: str, cell) -> str:
    rows = [r for r in _rows("agreement") if r["what"] == what]
    values = sorted({r["value"] for r in rows})
    lines = [[d, *(cell(only(rows, drafter=d, value=v)) for v in values)] for d in DRAFTERS]
    return markdown([first, *map(str, values)], lines)


def tasks() -> str:
    rows = _rows("tasks")
    lines = [
        [d, *(_metrics(only(rows, drafter=d, task=task, temperature=t, K=8)) for task, t in TASKS)]
        for d in ("consensus", "consensus-counts", *DRAFTERS[1:])
    ]
    return markdown(["", *(f"{task}, T = {t}" for task, t in TASKS)], lines)


def live() -> str:
    rows, lines = _rows("live"), []

    def tau(row: dict[str, Any], digits: int = 2) -> str:
        return between(row["tau"], (row["low"], row["high"]), digits)

    for t in sorted({r["temperature"] for r in rows}):
        records = {r["what"]: r for r in rows if r["temperature"] == t}
        full = ("live", "replay, true noise", "replay, posterior noise")
        bare = ("replay, consensus, not coupled", "replay, trie-prompt", "replay, prompt-lookup")
        lines.append(
            [
                str(t),
                *(tau(records[what]) for what in full),
                tau(records["true / posterior"], 3),
                *(f"{records[what]['tau']:.2f}" for what in bare),
            ]
        )
    head = [
        "temperature",
        "live",
        "replay, true noise",
        "replay, posterior",
        "true / posterior",
        "not coupled",
        "trie given the prompt",
        "prompt-lookup",
    ]
    return markdown(head, lines)


def eagle_times() -> str:
    rows = load("eagle_times")["rows"]
    drafters = dict.fromkeys(r["drafter"] for r in rows)
    lines = []
    for n, t in dict.fromkeys((r["samples"], r["temperature"]) for r in rows):
        records = (only(rows, samples=n, temperature=t, drafter=d) for d in drafters)
        cells = (
            f"{1e3 * median(r['draft_seconds']):.1f} / {sum(r['tokens']) / sum(r['seconds']):.0f}"
            for r in records
        )
        lines.append([f"N = {n}, T = {t:g}", *cells])
    return markdown(["draft, ms / tokens per second", *drafters], lines)


TABLES = {
    "eagle_times": eagle_times,
    "eagle": lambda: eagle_tables.tables(load("eagle"))[0],
    "eagle_pool": lambda: eagle_tables.tables(load("eagle"))[1],
    "strictness": strictness,
    "diversity": diversity,
    "temperature": lambda: _agreement("temperature, N = 8", "temperature", _metrics),
    "samples": lambda: _agreement("N, T = 0.7", "samples", _metrics),
    "foreign": lambda: _agreement("of other prompts", "foreign", lambda r: f"{r['tau']:.2f}"),
    "tasks": tasks,
    "live": live,
}
