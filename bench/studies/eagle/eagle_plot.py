"""The plot of `python -m bench eagle`: a head's training, and tau of each drafter."""

from bench.studies.eagle.eagle_tables import tau


def draw(result: dict, head: dict, path: str) -> None:
    """Write a plot of the rows with 16 nodes and of the curve of `bench eagle_head`.

    path: the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in result["rows"] if row["nodes"] == 16]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, axes = plt.subplots(1, 1 + len(tasks), figsize=(4.2 * (1 + len(tasks)), 3.8))
    curve = [row for row in head["curve"] if row["acceptance"] is not None]
    axes[0].plot([row["tokens"] / 1e3 for row in curve], [row["acceptance"] for row in curve])
    axes[0].set(title="training", xlabel="thousand tokens", ylabel="held-out acceptance")
    axes[0].grid(alpha=0.3)
    for ax, task in zip(axes[1:], tasks, strict=True):
        _bars(ax, [row for row in rows if row["task"] == task])
        ax.set_title(task)
    axes[1].set_ylabel("tokens per sample and step")
    labels = axes[1].get_legend_handles_labels()
    figure.legend(*labels, ncols=len(labels[0]), loc="lower center")
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _bars(ax, rows: list[dict]) -> None:
    cells = list(dict.fromkeys((row["samples"], row["temperature"]) for row in rows))
    drafters = list(dict.fromkeys(row["drafter"] for row in rows))
    width = 0.8 / len(drafters)
    for i, drafter in enumerate(drafters):
        by_cell = {
            (r["samples"], r["temperature"]): tau(r) for r in rows if r["drafter"] == drafter
        }
        places = [k + (i - (len(drafters) - 1) / 2) * width for k in range(len(cells))]
        ax.bar(places, [by_cell.get(cell, 0.0) for cell in cells], width, label=drafter)
    ax.set_xticks(range(len(cells)), [f"N = {n}\nT = {t:g}" for n, t in cells])
    ax.axhline(1, color="grey", linewidth=0.8)
