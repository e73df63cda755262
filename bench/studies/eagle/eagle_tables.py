"""The tables of a result of `python -m bench eagle`."""

from collections.abc import Callable
from statistics import median

from bench.lib.common import interval, markdown

# programs that ran at once, on average: above it no time is shown
QUIET = 2.0
KEY = ("task", "samples", "temperature", "nodes")


def tau(row: dict, pick: list[int] | None = None) -> float:
    return _ratio(row, "tokens", "steps", pick)


def tables(result: dict, times: bool = False) -> list[str]:
    """Markdown, in the order of docs/papers.md: figures, and the pool beside the better of both."""
    rows = result["rows"]
    head = ["task", "N", "T", "nodes", "drafter", "tau (95%)", "accepted length", "acceptance"]
    body = []
    for r in rows:
        cells = [*(str(r[name]) for name in KEY), r["drafter"]]
        cells += [_cell(r, tau, 2), _cell(r, _length, 2), _cell(r, _acceptance, 3)]
        if times:
            cells += _times(r)
        body.append(cells)
    parts = [markdown(head + (["draft, ms", "tokens/s"] if times else []), body)]
    pooled = _pooled(rows)
    if pooled:
        names = ["task", "N", "T", "nodes", "better of both", "pool to it (95%)"]
        parts.append(markdown(names, pooled))
    return parts


def _pooled(rows: list[dict]) -> list[list[str]]:
    """tau of the pool as a share of the better of graph and head on the same problems."""
    cells: dict[tuple, dict[str, dict]] = {}
    for r in rows:
        cells.setdefault(tuple(r[name] for name in KEY), {})[r["drafter"]] = r
    body = []
    for key, by_name in cells.items():
        if not {"pool", "eagle", "consensus"} <= {*by_name}:
            continue
        pool = by_name["pool"]
        better = max((by_name["eagle"], by_name["consensus"]), key=tau)

        def share(pick: list[int] | None = None, pool=pool, better=better) -> float:
            return tau(pool, pick) / tau(better, pick)

        low, high = interval(share, len(pool["steps"]))
        body.append([*map(str, key), better["drafter"], f"{share():.2f} ({low:.2f} to {high:.2f})"])
    return body


def _cell(row: dict, figure: Callable, digits: int) -> str:
    """A figure with its 95% interval over problems."""
    low, high = interval(lambda pick: figure(row, pick), len(row["steps"]))
    return f"{figure(row):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _length(row: dict, pick: list[int] | None = None) -> float:
    return _ratio(row, "accepted", "steps", pick)


def _acceptance(row: dict, pick: list[int] | None = None) -> float:
    return _ratio(row, "accepted", "proposed", pick)


def _ratio(row: dict, above: str, below: str, pick: list[int] | None) -> float:
    pick = [*range(len(row["steps"]))] if pick is None else pick
    return sum(row[above][i] for i in pick) / max(sum(row[below][i] for i in pick), 1)


def _times(row: dict) -> list[str]:
    if row["load"] >= QUIET:
        return ["", ""]
    rate = sum(row["tokens"]) / sum(row["seconds"])
    return [f"{1e3 * median(row['draft_seconds']):.1f}", f"{rate:.0f}"]
