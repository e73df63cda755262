"""Picture of a result: the seconds of eight answers, by engine, as bars."""

from bench.e2e.long.plan import CSD
from bench.e2e.long.tables import _named, by_seconds, headline, job, place
from bench.lib.svg import page, text

WIDTH, LEFT, RIGHT = 780, 236, 700
TOP, HEIGHT, GAP = 60, 26, 12
# (light mode, dark mode) of csd's bars and of the others'
OWN, OTHER = ("#0b62d6", "#5ba4ff"), ("#8a929b", "#8a929b")


def svg(result: dict) -> str:
    """Returns the content of the SVG file."""
    bars = by_seconds(headline(result))
    scale = (RIGHT - LEFT) / max(seconds for *_, seconds in bars)
    title = f"Seconds for {job(result)}"
    parts = [
        text(0, 18, title, "bold"),
        text(0, 38, place(result), "small"),
    ]
    for i, (engine, side, seconds) in enumerate(bars):
        y = TOP + i * (HEIGHT + GAP)
        kind = "own" if engine in CSD else "other"
        strong = "bold" if engine == "csd" else ""
        parts.append(text(LEFT - 10, y + 18, _named(engine, side), strong, "end"))
        parts.append(
            f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{seconds * scale:.1f}" '
            f'height="{HEIGHT}" rx="2"/>'
        )
        parts.append(text(LEFT + seconds * scale + 8, y + 18, f"{seconds:.1f}", strong))
    height = TOP + len(bars) * (HEIGHT + GAP)
    return page(title, WIDTH, height, _colours, parts)


def _colours(mode: int) -> str:
    return f".own {{ fill: {OWN[mode]} }} .other {{ fill: {OTHER[mode]} }}"
