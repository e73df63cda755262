"""Comparison of measured and predicted figures, which shows where a prediction has failed.

Predictions are those of bench/results/gpu_predicted.json (`python -m bench predictions`). A ratio
is the measured over the predicted figure.
"""

import json
from pathlib import Path

PREDICTED = Path(__file__).parents[1] / "results" / "gpu_predicted.json"


def of_gpu(name: str | None, path: Path = PREDICTED) -> list[dict]:
    """Returns the predicted rows of a device by its name; [] for one without a prediction."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return [row for row in rows if name and row["gpu"] in name]


def compared(sections: dict[str, dict], predicted: list[dict]) -> list[dict]:
    """Rows of all figures that have a prediction. sections: contents of the sections' files."""
    rows = []
    steps = [p for p in predicted if p["section"] == "end_to_end"]
    for row in sections.get("end_to_end", {}).get("rows", []):
        near = [p for p in steps if (p["shape"], p["N"]) == (row["shape"], row["N"])]
        for figure, size in (("step ms", row.get("rows")), ("plain step ms", 0)):
            if near and size is not None and row.get(figure):
                # the smallest pool is that of a step without drafts
                best = min(near, key=lambda p: abs(p["rows"] - size) if size else p["rows"])
                rows.append(
                    _row(
                        f"{row['shape']} N={row['N']} M={best['rows']}",
                        figure,
                        row[figure],
                        best["step ms"],
                    )
                )
    us = {p["shape"]: p["us"] for p in predicted if p["section"] == "attention"}
    for row in sections.get("attention_shapes", {}).get("rows", []):
        if row.get("provider") == "csd" and row.get("us") and row["shape"] in us:
            rows.append(_row(row["shape"], "attention us", row["us"], us[row["shape"]]))
    drafting = [p["us"] for p in predicted if p["section"] == "drafters"]
    for row in sections.get("end_to_end", {}).get("rows", []):
        phases = row.get("phases ms") or {}
        spent = [phases[name] for name in ("propose", "insert") if name in phases]
        if drafting and len(spent) == 2:
            name = f"{row['shape']} N={row['N']}"
            rows.append(_row(name, "propose and insert us", 1e3 * sum(spent), drafting[0]))
    return rows


def _row(what: str, figure: str, measured: float, predicted: float) -> dict:
    return {
        "what": what,
        "figure": figure,
        "measured": measured,
        "predicted": predicted,
        "ratio": measured / predicted,
    }
