"""Plot `bench/results/replay.json`: tau against drafted nodes, and against samples.

python -m bench plots bench/results/replay.json --out bench/results

A picture has the traces that were replayed with several of them, at 16 nodes or all samples. Needs
matplotlib, which nothing else here does.
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
        fig, axes = plt.subplots(1, len(shown), figsize=(6 * len(shown), 4.5), squeeze=False)
        for ax, (title, of) in zip(axes[0], shown.items(), strict=True):
            for drafter in sorted({r["drafter"] for r in of}):
                line = sorted((r[name], r["tau"]) for r in of if r["drafter"] == drafter)
                if len(line) > 1:
                    wide = 2.5 if drafter == "consensus" else 1
                    ax.plot(*zip(*line, strict=True), marker="o", label=drafter, linewidth=wide)
            ax.set(title=title, xlabel=label, ylabel="tokens a sample and step")
            ax.grid(alpha=0.3)
            ax.legend(fontsize=7)
        fig.tight_layout()
        fig.savefig(Path(args.out) / f"replay_{name}.png", dpi=90)
        plt.close(fig)


if __name__ == "__main__":
    main()
