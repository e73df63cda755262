"""Table of a model's step times, and the acceptance with which drafts pay on this machine.

A step over L slots commits one token per slot without drafts. With d drafted tokens, of which a
share a is accepted, it commits 1 + a d / L tokens per slot and takes r times as long. So drafts pay
from the acceptance

    a = (r - 1) L / d
"""

from typing import Any

from csd.engine.step.budget import StepTimeTable

# slots of the table's first part, as `csd.generate` with eight samples has
SLOTS = 8


def step_costs(table: StepTimeTable, slots: int = SLOTS) -> dict[str, Any]:
    """Rows, their milliseconds, and the acceptance needed with `slots` samples in flight.

    An acceptance of more than 1 is not attainable. It is None for steps without drafts.
    """
    base = table(slots)
    rows = [
        {
            "rows": size,
            "milliseconds": round(1000 * table(size), 2),
            "acceptance_needed": round((table(size) / base - 1) * slots / (size - slots), 3)
            if size > slots
            else None,
        }
        for size in sorted({*table.sizes, slots})
    ]
    marks = {"steady": table.steady, "settled": table.settled}
    return {"slots": slots, **marks, "rows": rows}


def shown(costs: dict[str, Any]) -> str:
    """The table as text."""
    lines = [
        f"steps of this model, with {costs['slots']} samples in flight:",
        "  rows  milliseconds  drafts pay where this share of them is accepted",
    ]
    for row in costs["rows"]:
        needed = row["acceptance_needed"]
        if needed is None:
            words = "(no drafts)" if row["rows"] == costs["slots"] else ""
        else:
            words = f"{needed:.0%}" if needed <= 1 else "never"
        lines.append(f"{row['rows']:6}  {row['milliseconds']:12.2f}  {words}".rstrip())
    if not costs["steady"]:
        then = "these times are kept" if costs["settled"] else "the next process repeats it"
        lines.append(f"other work disturbed the measurement; {then}")
    return "\n".join(lines)
