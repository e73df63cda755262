"""Picture of a result: tokens per second by the length of the answers, and parts of the gain.

An SVG without a background, whose colours follow the reader's light or dark mode.
"""

from html import escape
from math import ceil, log10

from bench.e2e.long.plan import CSD, PEERS
from bench.e2e.long.readme_table import SAMPLES, fastest, headline

WIDTH, HEIGHT = 780, 510
LEFT, RIGHT, TOP, BOTTOM = 60, 560, 46, 330
BARS, BAR_LEFT, BAR_RIGHT = (400, 450), 290, 690
# (light mode, dark mode) by side
COLOURS = {
    "csd": ("#0b62d6", "#5ba4ff"),
    "csd without drafts": ("#0e7f86", "#3fc7cf"),
    "vLLM": ("#b25400", "#f0a050"),
    "vLLM ngram": ("#8f6a00", "#d9b84a"),
    "llama.cpp": ("#7a3fb0", "#bd8cf0"),
    "llama.cpp, csd's dtype": ("#a8317e", "#f08cc4"),
    "transformers generate": ("#555d66", "#a9b2bc"),
    "transformers generate_batch": ("#7d4b3a", "#cf9a86"),
}
# style of a point whose samples do not count (`described`)
HOLLOW = ' fill-opacity="0" stroke-width="1.5"'


def svg(result: dict) -> str:
    """Returns the content of the SVG file."""
    parts = [*_lines(result), *_bars(headline(result))]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            'font-family="system-ui, sans-serif" font-size="12">',
            f"<title>{escape(_title(result))}</title>",
            f"<style>{_style()}</style>",
            *parts,
            "</svg>",
            "",
        ]
    )


def _style() -> str:
    def colours(mode: int, text: str, line: str) -> str:
        sides = " ".join(
            f".s{i} {{ stroke: {pair[mode]}; fill: {pair[mode]} }}"
            for i, pair in enumerate(COLOURS.values())
        )
        return (
            f"text {{ fill: {text}; stroke: none }} .grid {{ stroke: {line} }} "
            f".mark {{ stroke: {text} }} {sides}"
        )

    fixed = "path { fill: none !important; stroke-width: 2 } .bold { font-weight: 600 }"
    dark = colours(1, "#e6e9ed", "#4a525c")
    light = colours(0, "#1c2127", "#d4d9df")
    # opened alone, the picture has the background of the colour scheme
    scheme = ":root { color-scheme: light dark }"
    return f"{scheme} {light} {fixed} @media (prefers-color-scheme: dark) {{ {dark} }}"


def _title(result: dict) -> str:
    model, cores = result["model"].removesuffix(".gguf"), result["machine"]["cores"]
    return f"Tokens per second, {SAMPLES} samples of one prompt, {model}, {cores} CPU cores"


def _points(result: dict) -> dict[str, list[tuple[float, float, bool]]]:
    """Points of each row with 8 samples of the headline's task, by side.

    A point is (mean length, tokens per second, True if the row's samples count).
    """
    task = headline(result)["task"]
    rows = [
        r for r in result["rows"] if (r["kind"], r["samples"], r["task"]) == ("one", SAMPLES, task)
    ]
    sides = {
        side: sorted(
            (r["mean length"], r["tok/s"][side], r["counts"]) for r in rows if side in r["tok/s"]
        )
        for side in (*CSD, *PEERS)
    }
    return {side: points for side, points in sides.items() if points}


def _lines(result: dict) -> list[str]:
    sides = _points(result)
    lengths = [length for points in sides.values() for length, _, _ in points]
    low, high = log10(min(lengths) / 1.2), log10(max(lengths) * 1.2)
    most = max(speed for points in sides.values() for _, speed, _ in points)
    step = next(s for s in (50, 100, 200, 500, 1000, 2000, 5000) if most / s <= 6)
    top = ceil(most / step) * step

    def x(length: float) -> float:
        return LEFT + (log10(length) - low) / (high - low) * (RIGHT - LEFT)

    def y(speed: float) -> float:
        return BOTTOM - speed / top * (BOTTOM - TOP)

    parts = [_text(LEFT, 20, _title(result), "bold")]
    for speed in range(0, top + 1, step):
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y(speed):.1f}" y2="{y(speed):.1f}"/>'
        )
        parts.append(_text(LEFT - 8, y(speed) + 4, f"{speed:,}", anchor="end"))
    for length in sorted({round(length) for length, _, _ in sides["csd"]}):
        parts.append(_text(x(length), BOTTOM + 18, f"{length:,}", anchor="middle"))
    middle = (LEFT + RIGHT) / 2
    below = "tokens of an answer, mean"
    if not all(counts for points in sides.values() for _, _, counts in points):
        below += " (hollow: the model repeats itself there)"
    parts.append(_text(middle, BOTTOM + 36, below, anchor="middle"))
    for side, place in _apart({side: y(points[-1][1]) for side, points in sides.items()}).items():
        marks = [(x(length), y(speed), counts) for length, speed, counts in sides[side]]
        path = "M" + " L".join(f"{a:.1f} {b:.1f}" for a, b, _ in marks)
        parts.append(f'<g class="s{[*COLOURS].index(side)}"><path d="{path}"/>')
        parts += [
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5"{"" if counts else HOLLOW}/>'
            for a, b, counts in marks
        ]
        parts.append(
            f'<line x1="{RIGHT + 6}" x2="{RIGHT + 20}" y1="{place:.1f}" y2="{place:.1f}" '
            'stroke-width="3"/></g>'
        )
        parts.append(_text(RIGHT + 26, place + 4, side, "bold" if side in CSD else ""))
    return parts


def _apart(places: dict[str, float], least: float = 16) -> dict[str, float]:
    """Vertical positions of the names at the ends of their lines, at least `least` apart."""
    found, last = {}, -1e9
    for side, place in sorted(places.items(), key=lambda x: x[1]):
        found[side] = last = max(place, last + least)
    return found


def _bars(row: dict) -> list[str]:
    """SVG of two bars: the engine's gain over transformers, and the drafts' over the engine."""
    sides, plain = fastest(row), row["tok/s"]["csd without drafts"]
    rivals = {name: side for name, side in sides.items() if name not in CSD}
    bars = []
    if rivals:
        best = max(rivals.values(), key=row["tok/s"].__getitem__)
        bars.append(
            (
                "csd without drafts",
                f"engine: without drafts / {best}",
                plain / row["tok/s"][best],
                None,
            )
        )
    drafts, *interval = row["csd / other"]["csd without drafts"]
    bars.append(("csd", "drafts: with / without", drafts, interval))
    scale = (BAR_RIGHT - BAR_LEFT) / max(1.5, *(max([v, *(i or [])]) for _, _, v, i in bars))
    task = f"{row['task']}, at most {row['limit']:,} tokens, times as fast"
    parts = [_text(LEFT, BARS[0] - 14, task, "bold")]
    for y, (side, name, value, interval) in zip(BARS, bars, strict=False):
        parts.append(_text(LEFT, y + 15, name))
        parts.append(
            f'<rect class="s{[*COLOURS].index(side)}" x="{BAR_LEFT}" y="{y}" '
            f'width="{value * scale:.1f}" height="22"/>'
        )
        end = value
        if interval:
            low, high = (BAR_LEFT + v * scale for v in interval)
            parts.append(
                f'<line class="mark" x1="{low:.1f}" x2="{high:.1f}" y1="{y + 11}" '
                f'y2="{y + 11}" stroke-width="2"/>'
            )
            end = max(value, interval[1])
        parts.append(_text(BAR_LEFT + end * scale + 8, y + 15, f"{value:.2f}", "bold"))
    one = BAR_LEFT + scale
    parts.append(f'<line class="grid" x1="{one:.1f}" x2="{one:.1f}" y1="{BARS[0] - 6}" y2="478"/>')
    return [*parts, _text(one, 494, "1: as fast", anchor="middle")]


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )
