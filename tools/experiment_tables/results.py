"""Result files, and cells of tables."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "bench" / "results"
# short names of recorded files
OWN, GSM8K = "smollm2", "smollm2-135m_gsm8k_t0.7_n16"
MATH, CLASSEVAL = "qwen2.5-math_math_t0.7_n8", "gpt4_classeval_dev_t0.2_n5"


def load(name: str) -> Any:
    """The JSON of `bench/results/NAME.json`."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def only(rows: Iterable[dict], /, **fields: Any) -> dict:
    """The one row that has these values; raises ValueError where there is not one."""
    matches = [r for r in rows if all(r.get(k) == v for k, v in fields.items())]
    if len(matches) != 1:
        raise ValueError(f"{len(matches)} rows have {fields}, expected 1")
    return matches[0]


def change(ratio: float) -> str:
    """A ratio as a change in percent, 0 where it rounds to that."""
    text = f"{100 * (ratio - 1):+.1f}%"
    return "0" if text in ("+0.0%", "-0.0%") else text


def between(ratio: float, ends: Sequence[float], digits: int = 2) -> str:
    """A ratio with its interval."""
    low, high = ends
    return f"{ratio:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def fold(lines: list[list[str]]) -> list[list[str]]:
    """Rows whose first cell is empty where it repeats the one above."""
    return [
        ["" if i and line[0] == lines[i - 1][0] else line[0], *line[1:]]
        for i, line in enumerate(lines)
    ]
