"""Markdown tables of a result of `python -m bench draft_model`."""

from bench.lib.common import interval, markdown
from bench.studies.verification.verify_tables import tau

WORDS = "word problems"
# columns as papers on drafters report them
METRICS = ["accepted length", "acceptance", "nodes", "draft, ms"]
# load average above which no time is shown
QUIET = 2.0


def tables(result: dict) -> list[str]:
    """Markdown tables, in the order of docs/draft_models.md."""
    out = []
    if "pool" in result:
        base = next(r for r in result["pool"] if r["drafter"] == "consensus")
        body = [
            [r["drafter"], _with_interval(r), f"{tau(r) / tau(base):.2f}", *_metrics(r)]
            for r in result["pool"]
        ]
        out.append(markdown(["drafter", "tau (95%)", "to the graph alone", *METRICS], body))
    if "sequences" in result:
        rows, body = [{"task": WORDS} | r for r in result["sequences"]], []
        single = [r for r in rows if (r["verifier"], r["laws"]) == ("single", "one")]
        one = {(r["task"], r["draft"]): r for r in single}
        for r in rows:
            base = one[r["task"], r["draft"]]
            timed = all(x.get("load", 0) < QUIET for x in (r, base))
            rates = [f"{_rate(r, d) / _rate(base, d):.2f}" if timed else "" for d in (True, False)]
            named = [r["task"], r["draft"], r["verifier"], str(r["K"]), r["laws"]]
            body.append([*named, _with_interval(r), *_metrics(r), *rates])
        head = ["task", "draft", "verifier", "K", "laws", "block efficiency (95%)", *METRICS]
        head += ["token rate to single's", "without drafting"]
        out.append(markdown(head, body))
    return out


def _metrics(row: dict) -> list[str]:
    """Cells of a row, per sample and step.

    Accepted drafts, their share of the nodes, the nodes, and milliseconds of drafting, including
    the drafter's updates.
    """
    steps = sum(row["steps"])
    return [
        f"{row['accepted'] / steps:.2f}",
        f"{row['accepted'] / max(row['nodes'], 1):.0%}",
        f"{row['nodes'] / steps:.1f}",
        f"{1e3 * row['draft_seconds'] / steps:.1f}" if row.get("load", 0) < QUIET else "",
    ]


def _with_interval(row: dict) -> str:
    """tau, with its 95% interval over problems."""
    low, high = interval(lambda pick: tau(row, pick), len(row["steps"]))
    return f"{tau(row):.2f} ({low:.2f} to {high:.2f})"


def _rate(row: dict, drafting: bool) -> float:
    """Tokens per second, with or without the time of `drafting`."""
    return sum(row["tokens"]) / (row["seconds"] - (0 if drafting else row["draft_seconds"]))
