"""Options of multiple choice: the letter that a text begins with or names."""

import re

_LETTERS = "A-J"
# layout of LaTeX and Markdown; what stands in bold type or quotes is enclosed, as in parentheses
_STRESSED = re.compile(
    rf"(\*\*|__|[*_`\"'])\s*\(?([{_LETTERS}])\)?[.:]?\s*\1"
    rf"|\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{{\s*\(?([{_LETTERS}])\)?[.:]?\s*\}}"
)
_LAYOUT = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{|[{}*_`$\"'~]|\\[()\[\] ,;:!]"
)
_OPTION = re.compile(
    rf"[\s:=]*(?:(?:option|choice|letter)\s+)?(?:"
    rf"\(\s*(?P<round>[{_LETTERS}{_LETTERS.lower()}])\s*\)"
    rf"|\[\s*(?P<square>[{_LETTERS}{_LETTERS.lower()}])\s*\]"
    rf"|(?P<bracket>[{_LETTERS}{_LETTERS.lower()}])\)"
    # E. coli may be an option, J. R. R. Tolkien is none
    rf"|(?P<point>[{_LETTERS}])(?:[:]|\.(?!\s*[A-Z]\.))(?=\s|$)"
    rf"|(?P<bare>[{_LETTERS}])(?=\s*(?:$|[,;]|[—→]|[-–]\s+[A-Za-z]{{2}})|\s+(?:\(|(?:because|since|as|for|which)\b))"
    r")"
)
_ANOTHER = re.compile(
    rf"(?:,|;|&|/|\band\b|\bor\b)\s*(?:option\s+|choice\s+)?"
    rf"(?:[(\[][{_LETTERS}{_LETTERS.lower()}][)\]]|[{_LETTERS}](?![\w'’]| [a-z]))"
)
_REASON = re.compile(r"\b(?:because|since|as|for|not|which)\b|[.;:]\s", re.IGNORECASE)
_NAMED = re.compile(rf"\(([{_LETTERS}])\)|\b(?:[Oo]ption|[Cc]hoice)\s+\(?([{_LETTERS}])\b")


def option(text: str, small: bool = False) -> str | None:
    """Letter of the only option that a text begins with, as a capital; None without one.

    small: True if a small letter alone is an option too.
    """
    text = text[:400]
    text = _STRESSED.sub(lambda match: f"({match[2] or match[3]})", text)
    text = _LAYOUT.sub("", text).strip()
    if small and re.fullmatch(rf"[{_LETTERS.lower()}][.:]?", text):
        return text[0].upper()
    match = _OPTION.match(text)
    if match is None:
        return None
    rest = _REASON.split(text[match.end() :], maxsplit=1)[0]
    if _ANOTHER.search(rest):
        return None
    return next(letter for letter in match.groups() if letter).upper()


def options_in(text: str) -> list[str]:
    """Letters of the options that a text names, as (C) or "option C"."""
    return [match[1] or match[2] for match in _NAMED.finditer(text)]
