"""The study's plots, with matplotlib (`pip install 'csd-llm[plot]'`)."""

from pathlib import Path


def draw(sections: dict[str, list[dict]], folder: Path) -> list[str]:
    """Draw one file for each section that has a plot; returns their names."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, plot in (("strictness", _strictness), ("agreement", _agreement), ("tasks", _tasks)):
        rows = sections.get(name)
        if rows:
            figure = plot(plt, rows)
            figure.savefig(folder / f"study_{name}.png", dpi=100)
            plt.close(figure)
            made.append(f"study_{name}.png")
    return made


def _strictness(plt, rows):
    knobs = list(dict.fromkeys(r["knob"] for r in rows if r["knob"]))
    traces = list(dict.fromkeys(r["trace"] for r in rows))
    across = min(4, max(len(knobs), 1))
    down = max(1, -(-len(knobs) // across))
    size = (2.4 * across, 2.3 * down + 0.9)
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False)
    labels = {}
    for i, ax in enumerate(axes.flat):
        if i >= len(knobs):
            ax.set_axis_off()
            continue
        for colour, trace in enumerate(traces):
            for shape, style in (("chain", "-"), ("tree", "--")):
                points = [
                    r
                    for r in rows
                    if (r["trace"], r["drafter"], r["knob"]) == (trace, shape, knobs[i])
                ]
                x, y = [r["value"] for r in points], [r["tau"] for r in points]
                (labels[f"{trace}, {shape}"],) = ax.plot(
                    x, y, style, color=f"C{colour}", marker="o", markersize=4
                )
        ax.set_title(knobs[i], fontsize=10)
        ax.grid(alpha=0.3)
    for line in axes:
        line[0].set_ylabel("tau")
    _legend(figure, labels, 2)
    return figure


def _legend(figure, labels, across):
    """Draw a legend below the panels."""
    figure.legend(labels.values(), labels, ncols=across, loc="lower center")
    below = (0.1 + 0.22 * -(-len(labels) // across)) / figure.get_size_inches()[1]
    figure.tight_layout(rect=(0, below, 1, 1))


def _agreement(plt, rows):
    kinds = list(dict.fromkeys(r["what"] for r in rows))
    labels = {
        "temperature": "temperature",
        "foreign": "siblings of other prompts, of 7",
        "samples": "samples",
    }
    figure, axes = plt.subplots(1, len(kinds), figsize=(3.2 * len(kinds), 3.6), squeeze=False)
    lines: dict = {}
    for ax, kind in zip(axes[0], kinds, strict=True):
        for drafter in dict.fromkeys(r["drafter"] for r in rows):
            points = [r for r in rows if (r["what"], r["drafter"]) == (kind, drafter)]
            x, y = [r["value"] for r in points], [r["tau"] for r in points]
            (lines[drafter],) = ax.plot(x, y, "o-")
        if kind == "samples":
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter("{x:.0f}")
        ax.set(xlabel=labels[kind])
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("tokens per sample and step")
    _legend(figure, lines, 3)
    return figure


def _tasks(plt, rows):
    nodes = rows[0]["K"]
    rows = [r for r in rows if r["K"] == nodes]
    sets = list(dict.fromkeys((r["task"], r["temperature"]) for r in rows))
    drafters = list(dict.fromkeys(r["drafter"] for r in rows))
    figure, ax = plt.subplots(figsize=(9, 4.2))
    bars = {}
    for i, drafter in enumerate(drafters):
        by_set = {(r["task"], r["temperature"]): r for r in rows if r["drafter"] == drafter}
        x = [j + i * 0.8 / len(drafters) for j in range(len(sets))]
        y = [by_set[s]["tau"] for s in sets]
        error = [
            [by_set[s]["tau"] - by_set[s]["low"] for s in sets],
            [by_set[s]["high"] - by_set[s]["tau"] for s in sets],
        ]
        bars[drafter] = ax.bar(x, y, 0.8 / len(drafters), yerr=error, error_kw={"lw": 0.7})
    middle = [j + 0.4 - 0.4 / len(drafters) for j in range(len(sets))]
    ax.set_xticks(middle, [f"{task}, T={t}" for task, t in sets])
    ax.set(ylabel="tokens per sample and step", ylim=(1, None), title=f"{nodes} nodes, 8 samples")
    _legend(figure, bars, 4)
    return figure
