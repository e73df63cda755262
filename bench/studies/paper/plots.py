"""The study's plots, with matplotlib (`pip install 'csd[plot]'`)."""

from pathlib import Path


def draw(sections: dict[str, list[dict]], folder: Path) -> list[str]:
    """One file for each section that has something to draw; their names."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, plot in (("strictness", _strictness), ("agreement", _agreement), ("tasks", _tasks)):
        rows = sections.get(name)
        if rows:
            figure = plot(plt, rows)
            figure.tight_layout()
            figure.savefig(folder / f"study_{name}.png", dpi=80)
            plt.close(figure)
            made.append(f"study_{name}.png")
    return made


def _strictness(plt, rows):
    knobs = list(dict.fromkeys(r["knob"] for r in rows if r["knob"]))
    traces = list(dict.fromkeys(r["trace"] for r in rows))
    size = (3.2 * max(len(knobs), 1), 3.2 * len(traces))
    figure, axes = plt.subplots(len(traces), max(len(knobs), 1), figsize=size, squeeze=False)
    for line, trace in zip(axes, traces, strict=True):
        for ax, knob in zip(line, knobs, strict=False):
            for shape, colour in (("chain", "C0"), ("tree", "C1")):
                found = [r for r in rows if (r["trace"], r["drafter"], r["knob"]) ==
                         (trace, shape, knob)]  # fmt: skip
                x = [r["value"] for r in found]
                ax.plot(x, [r["tau"] for r in found], "o-", color=colour, label=f"{shape}: tau")
                share = [r["nodes"] / 10 for r in found]
                ax.plot(x, share, "x:", color=colour, label=f"{shape}: nodes / 10")
            ax.set(title=knob)
            ax.grid(alpha=0.3)
        line[0].set_ylabel(trace, fontsize=8)
    axes[0][0].legend(fontsize=6)
    return figure


def _agreement(plt, rows):
    kinds = list(dict.fromkeys(r["what"] for r in rows))
    labels = {"temperature": "temperature", "foreign": "siblings of other prompts, of 7",
              "samples": "samples"}  # fmt: skip
    figure, axes = plt.subplots(1, len(kinds), figsize=(4.5 * len(kinds), 3.6), squeeze=False)
    for ax, kind in zip(axes[0], kinds, strict=True):
        for drafter in dict.fromkeys(r["drafter"] for r in rows):
            found = [r for r in rows if (r["what"], r["drafter"]) == (kind, drafter)]
            ax.plot([r["value"] for r in found], [r["tau"] for r in found], "o-", label=drafter)
        if kind == "samples":
            ax.set_xscale("log", base=2)
        ax.set(xlabel=labels[kind], ylabel="tokens a sample and step")
        ax.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    return figure


def _tasks(plt, rows):
    nodes = rows[0]["K"]
    rows = [r for r in rows if r["K"] == nodes]
    sets = list(dict.fromkeys((r["task"], r["temperature"]) for r in rows))
    drafters = list(dict.fromkeys(r["drafter"] for r in rows))
    figure, ax = plt.subplots(figsize=(8, 3.6))
    for i, drafter in enumerate(drafters):
        found = {(r["task"], r["temperature"]): r for r in rows if r["drafter"] == drafter}
        x = [j + i * 0.8 / len(drafters) for j in range(len(sets))]
        y = [found[s]["tau"] for s in sets]
        error = [[found[s]["tau"] - found[s]["low"] for s in sets],
                 [found[s]["high"] - found[s]["tau"] for s in sets]]  # fmt: skip
        ax.bar(x, y, 0.8 / len(drafters), yerr=error, label=drafter, error_kw={"lw": 0.7})
    ax.set_xticks(range(len(sets)), [f"{task}, T={t}" for task, t in sets])
    ax.set(ylabel="tokens a sample and step", ylim=(1, None), title=f"{nodes} nodes, 8 samples")
    ax.legend(fontsize=7)
    return figure
