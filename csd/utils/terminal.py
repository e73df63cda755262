"""Text of others for a terminal, which would obey control characters in it."""

import unicodedata


def without_controls(text: str) -> str:
    """A text whose control characters are shown as escapes, but for tabs and ends of lines.

    A terminal would obey a model's text, which can move the cursor, retitle the window or write to
    the clipboard.
    """
    return "".join(
        c
        if c in "\n\t" or not unicodedata.category(c).startswith("C") or c == "\u200d"
        else c.encode("unicode_escape", "backslashreplace").decode()
        for c in text
    )


def one_line(text: str) -> str:
    """A text without control characters, its lines joined by spaces."""
    return without_controls(" ".join(text.split("\n")))
