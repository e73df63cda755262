"""Plot `bench/results/replay.json`: tau against drafted nodes, and against samples.

python -m bench plots bench/results/replay.json --out bench/results

Each picture has the traces with several values on its axis, at 16 nodes or all samples. Needs
matplotlib, which no other file here does.
"""

import argparse
import json
from pathlib import Path


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--out", default=".")
    args = parser.parse_args()
    rows = json.loads(Path(args.file).read_text())["rows"]
    for name, label, fixed in (
        ("nodes", "drafted nodes a sample and step at most", "samples"),
        ("samples", "samples of a prompt", "nodes"),
    ):
        shown = {}
        for trace in sorted({r["trace"] for r in rows}):
            of = [r for r in rows if r["trace"] == trace]
            at = 16 if fixed == "nodes" else max(r["samples"] for r in of)
            of = [r for r in of if r[fixed] == at]
            if len({r[name] for r in of}) > 1:
                shown[f"{trace}, {at} {fixed}"] = of
        if not shown:
            continue
        size = (4.7 * len(shown), 5.4)
        fig, axes = plt.subplots(1, len(shown), figsize=size, squeeze=False)
        drafters = sorted({r["drafter"] for r in rows})
        labels = {}
        for ax, (title, of) in zip(axes[0], shown.items(), strict=True):
            for i, drafter in enumerate(drafters):
                line = sorted((r[name], r["tau"]) for r in of if r["drafter"] == drafter)
                if len(line) > 1:
                    wide = 2.5 if drafter == "consensus" else 1
                    # ten colours, then the same ones with dashed lines
                    (labels[drafter],) = ax.plot(
                        *zip(*line, strict=True),
                        f"C{i % 10}",
                        marker="os"[i // 10],
                        linestyle=("-", "--")[i // 10],
                        linewidth=wide,
                    )
            ax.set(xlabel=label, xticks=sorted({r[name] for r in of}))
            ax.set_title(title, fontsize=10)
            ax.grid(alpha=0.3)
        axes[0][0].set_ylabel("tokens per sample and step")
        fig.legend(labels.values(), labels, ncols=5, loc="lower center")
        fig.tight_layout(rect=(0, 0.045 * -(-len(labels) // 5), 1, 1))
        fig.savefig(Path(args.out) / f"replay_{name}.png", dpi=100)
        plt.close(fig)


if __name__ == "__main__":
    main()
