"""The tables and pictures of a result of `python -m bench verify --figures DIR`."""

from pathlib import Path

from bench.lib.common import markdown
from bench.studies.verification.verify_figures import (
    DRAFTS,
    FIXED,
    PLOTTED,
    REGION_DRAFTS,
    fewest,
    simplex,
)

COLOURS = {2: "#08519c", 3: "#3182bd", 4: "#6baed6", 8: "#bdd7e7"}
NAMES = {
    "bound": "bound",
    "canonical": "canonical, s = 5",
    "kseq": "K-SEQ",
    "recursive": "recursive (SpecInfer)",
    "single": "single",
}
SWEPT = {"alphabet": "alphabet, s = 5", "s": "s, alphabet 40"}
CORNERS = {"a": (-0.05, -0.05), "b": (1.02, -0.05), "c": (0.48, 0.89)}


def _share(x: float) -> str:
    """Three digits after the point, without the leading zero."""
    return f"{x:.3f}".removeprefix("0")


def tables(result: dict) -> list[str]:
    """Markdown tables, in the order of docs/verifiers.md."""
    regions = [
        [row["moves"], row["fixed"], *(f"{row[f'K={k}']:.1%}" for k in REGION_DRAFTS)]
        for row in result["regions"]
    ]
    heads = [key for key in result["temperature"][0] if key.startswith("T=")]
    by_kind = {(r["drafts"], r["K"], r["scheme"]): r for r in result["temperature"]}
    same = [
        [NAMES[name]]
        + [" / ".join(_share(by_kind["same", k, name][t]) for k in DRAFTS) for t in heads]
        for name in PLOTTED
    ]
    other = [
        [f"{NAMES[s]}, first draft at 1.2", *(_share(r[t]) for t in heads)]
        for (kind, _, s), r in by_kind.items()
        if kind == "different"
    ]
    cut = [
        [(NAMES | SWEPT)[row["swept"]], "" if row["value"] is None else str(row["value"])]
        + [f"{row[f'K={k}']:.4f}" for k in (2, 4)]
        for row in result["truncation"]
    ]
    return [
        markdown(["moves", "the other is", *(f"K = {k}" for k in REGION_DRAFTS)], regions),
        markdown(["K = 2 / 4 / 8", *heads], same),
        markdown(["K = 2", *heads], other),
        markdown(["swept", "value", "K = 2", "K = 4"], cut),
    ]


def draw(result: dict, folder: Path) -> None:
    """Write `verify_regions.png`, `verify_temperature.png` and `verify_truncation.png`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for name, make in (
        ("regions", _regions),
        ("temperature", _temperature),
        ("truncation", _truncation),
    ):
        figure = make(plt, result)
        figure.tight_layout()
        figure.savefig(folder / f"verify_{name}.png", dpi=90)
        plt.close(figure)


def _regions(plt, result: dict):
    """Draw triangles, in which a corner is the distribution with one certain letter."""
    figure, axes = plt.subplots(2, len(FIXED), figsize=(3.6 * len(FIXED), 6.6))
    points = simplex()
    x, y = points[:, 1] + points[:, 2] / 2, points[:, 2] * 3**0.5 / 2
    for line, of in zip(axes, ("target", "proposal"), strict=True):
        for axis, (name, probs) in zip(line, FIXED.items(), strict=True):
            fewest_drafts = fewest(probs, of)
            for k in REGION_DRAFTS:
                at = fewest_drafts == k
                axis.scatter(x[at], y[at], s=3, c=COLOURS[k], linewidths=0, label=f"K = {k}")
            axis.plot([0, 1, 0.5, 0], [0, 0, 3**0.5 / 2, 0], "k-", linewidth=0.8)
            axis.plot(probs[1] + probs[2] / 2, probs[2] * 3**0.5 / 2, "r+", markersize=8)
            for letter, place in CORNERS.items():
                axis.text(*place, letter, fontsize=8)
            other = "proposal" if of == "target" else "target"
            axis.set_title(f"{of}s that can always be met,\n{other} {name}", fontsize=8)
            axis.set_aspect("equal")
            axis.axis("off")
    axes[0][0].legend(fontsize=7, markerscale=3, loc="upper left")
    return figure


def _temperature(plt, result: dict):
    rows = result["temperature"]
    panels = [("same", k) for k in DRAFTS] + [("different", 2)]
    figure, axes = plt.subplots(1, len(panels), figsize=(3.4 * len(panels), 3.4), sharey=True)
    for (kind, k), axis in zip(panels, axes, strict=True):
        for row in rows:
            if (row["drafts"], row["K"]) == (kind, k):
                line = {float(t[2:]): v for t, v in row.items() if t.startswith("T=")}
                place = PLOTTED.index(row["scheme"])
                # a scheme has the same colour in all panels
                style = f"C{place - 1}o-" if place else "k--"
                axis.plot(
                    *zip(*line.items(), strict=True),
                    style,
                    label=NAMES[row["scheme"]],
                    markersize=3,
                    linewidth=1,
                )
        axis.set_title(f"K = {k}" if kind == "same" else "K = 2, first draft at 1.2", fontsize=9)
        axis.set_xlabel("draft temperature")
    axes[0].set_ylabel("acceptance")
    axes[0].legend(fontsize=6)
    return figure


def _truncation(plt, result: dict):
    rows = result["truncation"]
    figure, axes = plt.subplots(1, 2, figsize=(7.5, 3.4), sharey=True)
    for swept, axis in zip(("alphabet", "s"), axes, strict=True):
        for k, colour in ((2, "C0"), (4, "C1")):
            line = [(r["value"], r[f"K={k}"]) for r in rows if r["swept"] == swept]
            axis.plot(
                *zip(*line, strict=True),
                "o-",
                color=colour,
                markersize=3,
                linewidth=1,
                label=f"canonical, K = {k}",
            )
            for name, style in (("bound", "--"), ("kseq", ":"), ("recursive", "-.")):
                (level,) = (r[f"K={k}"] for r in rows if r["swept"] == name)
                axis.axhline(
                    level,
                    color=colour,
                    linestyle=style,
                    linewidth=0.8,
                    label=f"{NAMES[name]}, K = {k}",
                )
        axis.set_xscale("log")
        axis.set_xlabel(SWEPT[swept])
    axes[0].set_ylabel("acceptance")
    axes[1].legend(fontsize=5)
    return figure
