"""Plots of the speed-up and of the share of the roofline over N, as PNG."""

from pathlib import Path


def draw(rows: list[dict], out: Path) -> list[str]:
    """Draw the plots; returns the files, [] without matplotlib or without rows."""
    if not rows:
        return []
    try:
        import matplotlib
    except ImportError:
        print("plots left out: matplotlib is not installed")
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    written = []
    for name, title, columns in (
        ("speedup", "speed-up over the same engine without drafts", ("speedup", "ideal speedup")),
        ("roofline", "share of the roofline", ("roofline share", "plain roofline share")),
    ):
        figure, axes = plt.subplots(figsize=(6, 4))
        for shape in sorted({r["shape"] for r in rows}):
            mine = sorted((r for r in rows if r["shape"] == shape), key=lambda r: r["N"])
            for column, style in zip(columns, ("o-", "x--"), strict=True):
                axes.plot(
                    [r["N"] for r in mine],
                    [r[column] for r in mine],
                    style,
                    label=f"{shape}: {column}",
                )
        axes.set(xscale="log", xlabel="samples", title=title)
        axes.axhline(1, color="grey", linewidth=0.5)
        axes.legend(fontsize=7)
        figure.savefig(out / f"{name}.png", dpi=120, bbox_inches="tight")
        plt.close(figure)
        written.append(f"{name}.png")
    return written
