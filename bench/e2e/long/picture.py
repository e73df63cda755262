"""Picture of a result: the seconds of eight answers, by engine, as bars.

An SVG without a background, whose colours follow the reader's light or dark mode.
"""

from html import escape

from bench.e2e.long.plan import CSD
from bench.e2e.long.tables import _named, by_seconds, headline, job, place

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
        _text(0, 18, title, "bold"),
        _text(0, 38, place(result), "small"),
    ]
    for i, (engine, side, seconds) in enumerate(bars):
        y = TOP + i * (HEIGHT + GAP)
        kind = "own" if engine in CSD else "other"
        strong = "bold" if engine == "csd" else ""
        parts.append(_text(LEFT - 10, y + 18, _named(engine, side), strong, "end"))
        parts.append(
            f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{seconds * scale:.1f}" '
            f'height="{HEIGHT}" rx="2"/>'
        )
        parts.append(_text(LEFT + seconds * scale + 8, y + 18, f"{seconds:.1f}", strong))
    height = TOP + len(bars) * (HEIGHT + GAP)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            'font-family="system-ui, sans-serif" font-size="14">',
            f"<title>{escape(title)}</title>",
            f"<style>{_style()}</style>",
            *parts,
            "</svg>",
            "",
        ]
    )


def _style() -> str:
    def colours(mode: int, text: str) -> str:
        return (
            f"text {{ fill: {text} }} .own {{ fill: {OWN[mode]} }} .other {{ fill: {OTHER[mode]} }}"
        )

    fixed = ".bold { font-weight: 600 } .small { font-size: 12px }"
    dark = colours(1, "#e6e9ed")
    # opened alone, the picture has the background of the colour scheme
    scheme = ":root { color-scheme: light dark }"
    return (
        f"{scheme} {colours(0, '#1c2127')} {fixed} @media (prefers-color-scheme: dark) {{ {dark} }}"
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )
