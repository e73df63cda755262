"""Tables of cpu.md."""

from bench.lib.common import markdown
from tools.experiment_tables.results import load, only

# parts of a step that are shown, and the fields that they add up
PARTS = {
    "matrix products": ("products", "head"),
    "attention": ("attention",),
    "rest of the layers": ("layers",),
    "verify": ("verify",),
    "propose, commit, insert": ("propose", "commit", "insert"),
    "one by one": ("one by one",),
    "step": ("step",),
}


def _part(row: dict, fields: tuple[str, ...]) -> str:
    return f"{sum(row[name] for name in fields):.1f}"


def _steps(name: str) -> str:
    """A step's parts; arrows lead from the references to the loops where a file has both."""
    rows = load(name)["rows"]
    lines = []
    for row in (r for r in rows if r["kernels"] == "default"):
        cells = {part: _part(row, fields) for part, fields in PARTS.items()}
        before = [
            r
            for r in rows
            if r["kernels"] == "reference"
            and (r["samples"], r["nodes"]) == (row["samples"], row["nodes"])
        ]
        for old in before:
            # products are csd's own on both sides
            cells |= {
                part: f"{_part(old, PARTS[part])} → {cells[part]}" for part in list(PARTS)[1:]
            }
        lines.append(
            [str(row["samples"]), str(row["nodes"]), *cells.values(), f"{row['over products']:.2f}"]
        )
    return markdown(["samples", "nodes", *PARTS, "step / products"], lines)


def _products(name: str) -> str:
    records = load(name)["rows"]
    sizes = sorted({r["rows"] for r in records})
    lines = []
    for dtype in ("bfloat16", "float32"):
        rows = [only(records, dtype=dtype, rows=n) for n in sizes]
        taken = rows[0]["taken"]
        ms = {
            f"{dtype}, `F.linear`": "plain",
            f"{dtype}, oneDNN, packed": "onednn",
            f"{dtype}, csd, laid out": taken,
            "faster of the two / csd": "gain",
            "the same by FMAs of float32": "fma",
            f"{dtype}, csd, plain": f"{taken}, plain",
            "`F.linear` / csd, plain": "gain, plain",
        }
        if taken == "fma":
            ms.pop("the same by FMAs of float32")
        for label, field in ms.items():
            shown = (f"{r[field]:.2f}" if "gain" in field else f"{r[field]:.0f}" for r in rows)
            lines.append([label, *shown])
    return markdown(["rows", *map(str, sizes)], lines)


def step_times() -> str:
    records = load("step_times")
    names = {
        "bfloat16": "seconds",
        "bfloat16, plain": "bfloat16, plain",
        "float32": "float32, packed",
        "float32, plain": "float32, plain",
    }
    places = [i for i, rows in enumerate(records["rows"]) if rows != 2]
    lines = [
        [label, *(f"{1000 * records[field][i]:.1f}" for i in places)]
        for label, field in names.items()
    ]
    return markdown(["rows", *(str(records["rows"][i]) for i in places)], lines)


TABLES = {
    "step": lambda: _steps("step_parts"),
    "step_xeon": lambda: _steps("step_parts_xeon"),
    "products": lambda: _products("products"),
    "products_xeon": lambda: _products("products_xeon"),
    "step_times": step_times,
}
