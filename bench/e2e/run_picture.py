"""Picture of a run: the tokens of every answer, and how each came about."""

from itertools import groupby

from bench.lib.svg import page, text
from csd.evaluate.report.data import alone_from

WIDTH, LEFT, RIGHT, TOP, STEP, HEIGHT = 780, 30, 640, 66, 24, 16
# kind of a token -> what the legend calls it, and its colours in light and dark mode
KINDS = {
    "shared": ("read once for several answers", "#2a6f4e", "#6cc79a"),
    "sibling": ("drafted from another answer", "#f4a259", "#c9762f"),
    "own": ("drafted from its own text", "#8ecae6", "#3f86a8"),
    "drawn": ("drawn one by one", "#cfd4da", "#4a515c"),
}


def kinds(tokens: list[list[int]], sources: list[list[str]]) -> list[list[str]]:
    """Kind of each token of each answer."""
    alone = alone_from(tokens)
    return [
        [
            "shared" if end is None or at < end else source if source in KINDS else "drawn"
            for at, source in enumerate(of)
        ]
        for of, end in zip(sources, alone, strict=True)
    ]


def svg(title: str, run: dict) -> str:
    """Returns the content of the SVG file.

    run: tokens and sources of each answer, and labels, which stand behind them.
    """
    rows = kinds(run["tokens"], run["sources"])
    scale = (RIGHT - LEFT) / max(map(len, rows))
    parts = [text(0, 18, title, "bold")]
    x = 0.0
    for kind, (name, *_) in KINDS.items():
        parts += [_bar(kind, x, 32, 12, 12), text(x + 17, 43, name, "small")]
        x += 38 + 6.2 * len(name)
    for i, row in enumerate(rows):
        y, at = TOP + i * STEP, 0
        parts.append(text(LEFT - 10, y + 13, str(i + 1), "small", "end"))
        for kind, group in groupby(row):
            count = len([*group])
            parts.append(_bar(kind, LEFT + at * scale, y, count * scale, HEIGHT))
            at += count
        parts.append(text(LEFT + at * scale + 8, y + 13, run["labels"][i], "small"))
    height = TOP + len(rows) * STEP
    return page(title, WIDTH, height, _colours, parts)


def _colours(mode: int) -> str:
    return " ".join(f".{kind} {{ fill: {names[1 + mode]} }}" for kind, names in KINDS.items())


def _bar(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}"/>'
