"""Rows of `python -m bench replay`: intervals, ratios to the other drafters, tables."""

from typing import Any

from bench.lib.common import interval, markdown

# drafters of this repository that are, at least in part, not published elsewhere
OURS = (
    "consensus",
    "consensus-uncoupled",
    "consensus-counts",
    "trie-prompt",
    "paper-tree",
    "paper-shrinking",
    "paper-shrinking-tree",
    "paper-shrinking-fuzzy",
)
KEY = ("trace", "drafter", "samples", "nodes")


def ratio(ours: dict, theirs: dict, pick) -> float:
    """tau of one row over that of another, both over the problems `pick`."""

    def tau(row):
        tokens, steps = (row["by_problem"][name] for name in ("tokens", "sample_steps"))
        return sum(tokens[i] for i in pick) / sum(steps[i] for i in pick)

    return tau(ours) / tau(theirs)


def add_ratios(rows: list[dict]) -> None:
    """Add to rows of `consensus`, in place, the ratio of its tau to that of the best other drafter.

    The others have the same problems and budget; one ratio is to published drafters, one to any.
    """
    for row in rows:
        if row["drafter"] != "consensus":
            continue
        peers = [
            r
            for r in rows
            if all(r[k] == row[k] for k in ("trace", "samples", "nodes"))
            and r["by_problem"]["problem"] == row["by_problem"]["problem"]
            and not r["drafter"].startswith("consensus")
        ]
        published = [r for r in peers if r["drafter"] not in OURS]
        for name, among in (("published", published), ("any", peers)):
            if not among:
                continue
            best = max(among, key=lambda r: r["tau"])
            count = len(row["by_problem"]["problem"])
            row[f"best_{name}"] = best["drafter"]
            row[f"ratio_{name}"] = ratio(row, best, range(count))
            row[f"ratio_{name}_interval"] = interval(
                lambda pick, row=row, best=best: ratio(row, best, pick), count
            )


def ratio_text(row: dict) -> str:
    """The ratio of a row with a prior to the graph alone, in what is printed for it."""
    if "ratio" not in row:
        return ""
    low, high = row["ratio_interval"]
    return f"  {row['ratio']:.3f} ({low:.3f} to {high:.3f}) times the graph alone"


def metrics(row: dict) -> str:
    """Cell of a table with tau."""
    return f"{row['tau']:.2f}"


def column(row: dict) -> tuple[str, int, int]:
    return row["trace"], row["samples"], row["nodes"]


def tables(rows: list[dict], nodes: int = 16) -> list[str]:
    """Markdown tables: tau of every drafter and trace at `nodes` nodes, and ratios of `consensus`.

    The ratios are at every budget.
    """
    by_drafter: dict[str, dict[tuple, Any]] = {}
    for row in rows:
        by_drafter.setdefault(row["drafter"], {})[column(row)] = row
    columns = list(dict.fromkeys(column(r) for r in rows if r["nodes"] == nodes))
    out = []
    for trace in dict.fromkeys(c[0] for c in columns):
        of = [c for c in columns if c[0] == trace]
        problems = {r["problems"] for r in rows if column(r) in of}
        head = [f"{trace}, {'/'.join(map(str, sorted(problems)))} problems"]
        head += [f"N = {samples}" for _, samples, _ in of]
        body = [
            [name, *(metrics(cells[c]) if c in cells else "" for c in of)]
            for name, cells in by_drafter.items()
            if any(c in cells for c in of)
        ]
        out.append(markdown(head, body))
    body = [
        [
            r["trace"],
            str(r["samples"]),
            str(r["nodes"]),
            f"{r['tau']:.3f}",
            *(
                f"{r[f'ratio_{x}']:.3f} ({r[f'ratio_{x}_interval'][0]:.3f} to "
                f"{r[f'ratio_{x}_interval'][1]:.3f}) {r[f'best_{x}']}"
                for x in ("published", "any")
            ),
        ]
        for r in rows
        if "ratio_published" in r
    ]
    head = ["trace", "N", "nodes", "tau", "to the best published", "to the best of all others"]
    return [*out, markdown(head, body)]


def text(rows: list[dict]) -> str:
    """Line that is printed for a row while replays run."""
    lines = [
        f"{'trace':28} {'drafter':20} {'N':>3} {'K':>3} {'tau':>6} {'95%':>13} {'nodes':>6} "
        f"{'length':>6} {'accept':>6} {'draft':>7} "
        f"{'us/step':>8} {'steps':>6} {'own':>5} {'sibl':>5} {'prom':>5}"
    ]
    for r in rows:
        low, high = r["interval"]
        lines.append(
            f"{r['trace'][:28]:28} {r['drafter']:20} {r['samples']:3} {r['nodes']:3} "
            f"{r['tau']:6.3f} {low:6.3f}-{high:6.3f} {r['nodes_used']:6.2f} "
            f"{r['accepted_length']:6.3f} {r['acceptance']:6.1%} {r['draft_microseconds']:7.0f} "
            f"{r['microseconds']:8.0f} {r['makespan']:6}"
            + "".join(f" {r['sources'][s]:5.2f}" for s in ("own", "sibling", "prompt"))
            + ratio_text(r)
        )
    return "\n".join(lines)
