"""SVG pictures without a background, whose colours follow the reader's light or dark mode."""

from collections.abc import Callable
from html import escape


def page(
    title: str, width: int, height: int, colours: Callable[[int], str], parts: list[str]
) -> str:
    """Returns the content of an SVG file.

    colours: rules of CSS for the light mode, 0, and for the dark one, 1. parts: its elements.
    """
    # opened alone, the picture has the background of the colour scheme
    light = f":root {{ color-scheme: light dark }} text {{ fill: #1c2127 }} {colours(0)}"
    fixed = ".bold { font-weight: 600 } .small { font-size: 12px }"
    dark = f"text {{ fill: #e6e9ed }} {colours(1)}"
    style = f"{light} {fixed} @media (prefers-color-scheme: dark) {{ {dark} }}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            'font-family="system-ui, sans-serif" font-size="14">',
            f"<title>{escape(title)}</title>",
            f"<style>{style}</style>",
            *parts,
            "</svg>",
            "",
        ]
    )


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    """Text at a point. kind: "bold", "small" or nothing."""
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}'
        "</text>"
    )
