"""Dot plot of every drafter's tau, from the rows of `python -m bench replay`.

    python -m bench dots bench/results/replay.json --out docs/experiments/drafters.svg

It has one panel per trace, with all of its samples at 16 drafted nodes. The SVG has a light and a
dark colour scheme, and consists of text and shapes only.
"""

import argparse
import json
from html import escape
from pathlib import Path

NODES = 16
STYLE = """svg { background: #fff; font: 13px system-ui, sans-serif; } text { fill: #222; }
.soft { fill: #666; } .line { stroke: #ccc; } .dot { fill: #8a8f98; } .ours { fill: #d55e00; }
@media (prefers-color-scheme: dark) { svg { background: #16181d; } text { fill: #e4e4e4; }
.soft { fill: #a6a6a6; } .line { stroke: #3a3e47; }
.dot { fill: #9aa0aa; } .ours { fill: #f08a3c; } }"""
ROW, LABEL, PLOT, TOP, GAP = 19, 172, 240, 54, 12


def panels(rows: list[dict]) -> dict[str, list[tuple[str, float]]]:
    """(drafter, tau) pairs of each trace, the highest tau first."""
    by_trace: dict[str, list[tuple[str, float]]] = {}
    for trace in dict.fromkeys(r["trace"] for r in rows):
        of = [r for r in rows if r["trace"] == trace and r["nodes"] == NODES]
        largest = max((r["samples"] for r in of), default=0)
        of = [r for r in of if r["samples"] == largest]
        if len(of) > 1:
            name = f"{trace}, {largest} samples"
            by_trace[name] = sorted(((r["drafter"], r["tau"]) for r in of), key=lambda x: -x[1])
    return by_trace


def picture(rows: list[dict]) -> str:
    """Returns the SVG of `panels`, in two columns."""
    shown = [*panels(rows).items()]
    heights = [TOP + ROW * len(drafters) + 34 for _, drafters in shown]
    lines = [max(heights[i : i + 2]) for i in range(0, len(heights), 2)]
    width, height = 2 * (LABEL + PLOT + GAP), sum(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>Tokens per step of a sample by drafter, at {NODES} drafted nodes</title>",
        f"<style>{STYLE}</style>",
    ]
    for i, (name, drafters) in enumerate(shown):
        left, top = (i % 2) * (LABEL + PLOT + GAP), sum(lines[: i // 2])
        parts += _panel(name, drafters, left, top)
    return "\n".join([*parts, "</svg>\n"])


def _panel(name: str, drafters: list[tuple[str, float]], left: int, top: int) -> list[str]:
    last = max(tau for _, tau in drafters)
    ticks = (
        [1 + i * max(1, round((last - 1) / 4)) for i in range(9)] if last > 3 else [1, 1.5, 2, 2.5]
    )
    ticks = [t for t in ticks if t <= last + 0.3]

    def x(tau: float) -> float:
        return left + LABEL + (PLOT - 40) * (tau - 1) / max(last - 1, 0.1)

    bottom = top + TOP + ROW * len(drafters)
    parts = [f'<text x="{left + 10}" y="{top + 30}">{escape(name)}</text>']
    for tick in ticks:
        parts.append(
            f'<line class="line" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{top + TOP - 12}" '
            f'y2="{bottom}"/><text class="soft" x="{x(tick):.1f}" y="{bottom + 16}" '
            f'text-anchor="middle">{tick:g}</text>'
        )
    for i, (drafter, tau) in enumerate(drafters):
        y = top + TOP + ROW * i
        kind = "ours" if drafter == "consensus" else "dot"
        parts.append(
            f'<text x="{left + LABEL - 12}" y="{y + 4}" text-anchor="end">{escape(drafter)}</text>'
            f'<circle class="{kind}" cx="{x(tau):.1f}" cy="{y}" r="5"/>'
            f'<text class="soft" x="{x(tau) + 9:.1f}" y="{y + 4}">{tau:.2f}</text>'
        )
    return parts


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--out", required=True)
    args = parser.parse_args(argv)
    Path(args.out).write_text(picture(json.loads(Path(args.file).read_text())["rows"]))


if __name__ == "__main__":
    main()
