"""Rows of the result: samples that the sides of one cell drew alternately."""

from statistics import mean, median
from typing import Any

from bench.e2e.forced_cpu import engine_of, measure
from bench.e2e.long.drawn import Drawn, described
from bench.e2e.long.plan import PROMPTS, TASKS, Cell
from bench.e2e.long.prompts import prompt
from bench.lib.common import bootstrap
from bench.lib.forced import cut
from bench.lib.models import ids_of
from csd.traces.traces import read_traces

# number of prompts of a recorded row
RECORDED = 2


def drawn_in_turns(cell: Cell, sides: dict[str, Any], tokenizer: Any, pairs: int) -> dict:
    """Draw a cell's samples with its sides alternately; returns the row.

    sides: by name; they include those of the cell, one of which is "csd".
    """
    by_side: dict[str, list[Drawn]] = {name: [] for name in cell.sides}
    for i in range(pairs):
        if cell.kind == "many":
            texts = [prompt(TASKS[j % len(TASKS)], cell.limit, i + j) for j in range(PROMPTS)]
        else:
            texts = [prompt(cell.task, cell.limit, i)]
        ids = [ids_of(tokenizer, text) for text in texts]
        for name in cell.sides if i % 2 else cell.sides[::-1]:
            side = sides[name]
            if cell.kind == "many":
                by_side[name].append(side.draw_all(ids, cell.samples, cell.limit, i))
            else:
                by_side[name].append(side.draw(ids[0], cell.samples, cell.limit, i))
    return row(cell, by_side)


def row(cell: Cell, by_side: dict[str, list[Drawn]]) -> dict:
    """Returns one row; its statistics on text are of csd's samples."""
    own = by_side["csd"]
    rates = {name: [drawn.rate for drawn in of] for name, of in by_side.items()}
    samples = [sample for drawn in own for sample in drawn.tokens]
    result = _named(cell) | described(samples, [x for drawn in own for x in drawn.ended])
    result |= {
        "tau": median(drawn.tau or 0 for drawn in own),
        "tok/s": {name: median(of) for name, of in rates.items()},
        "csd / other": {
            name: _interval([a / b for a, b in zip(rates["csd"], of, strict=True)])
            for name, of in rates.items()
            if name != "csd"
        },
        "mean length of each": {
            name: mean(len(sample) for drawn in of for sample in drawn.tokens)
            for name, of in by_side.items()
        },
        "rates": rates,
    }
    if "csd without drafts" in by_side:
        both = zip(own, by_side["csd without drafts"], strict=True)
        pairs = [x for a, b in both for x in zip(a.tokens, b.tokens, strict=True)]
        result["equal samples"] = f"{sum(a == b for a, b in pairs)}/{len(pairs)}"
    return result


def recorded(cell: Cell, path: str, shape: str, dtype: Any, pairs: int) -> dict:
    """Row of recorded samples run by a shape with random weights (`bench/e2e/forced_cpu.py`)."""
    engine = engine_of(shape, dtype)
    traces = list(read_traces(path))[:RECORDED]
    measure(engine, [cut(traces[0], cell.samples, 16)], cell.samples, ["auto"], 1)
    traces = [cut(trace, cell.samples, cell.limit) for trace in traces]
    (measured,) = measure(engine, traces, cell.samples, ["auto"], pairs)
    samples = [(s, s[-1] in t.stop_ids) for t in traces for s in t.samples]
    tokens, ended = zip(*samples, strict=True)
    return (
        _named(cell)
        | described(list(tokens), list(ended))
        | {
            "task": f"recorded {cell.task}, {shape}'s shape with random weights",
            "traces": path,
            "tau": measured["tau"],
            "tok/s": {
                "csd": measured["csd tok/s"],
                "csd without drafts": measured["no drafts tok/s"],
            },
            "csd / other": {
                "csd without drafts": [measured["csd/no drafts"], measured["low"], measured["high"]]
            },
        }
    )


def _named(cell: Cell) -> dict:
    return {
        "name": cell.name,
        "kind": cell.kind,
        "task": cell.task,
        "samples": cell.samples,
        "limit": cell.limit,
        "slots": cell.slots,
        "prompts": PROMPTS if cell.kind == "many" else 1,
    }


def _interval(values: list[float]) -> list[float]:
    return [median(values), *bootstrap(values)]


def shown(row: dict) -> dict:
    """Returns a row in the form of the printed table."""
    columns = (
        "kind",
        "task",
        "samples",
        "limit",
        "slots",
        "mean length",
        "ended",
        "distinct 8-grams",
        "counts",
        "tau",
    )
    return (
        {name: row[name] for name in columns}
        | row["tok/s"]
        | {
            f"/ {name}": f"{x:.2f} ({low:.2f} to {high:.2f})"
            for name, (x, low, high) in row["csd / other"].items()
        }
    )
