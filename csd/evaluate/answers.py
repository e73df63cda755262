"""Extraction and comparison of the answers of worked solutions."""

import re
from collections.abc import Callable
from fractions import Fraction

from csd.schema.check import shown

# a minus counts as a sign unless it stands between two numbers; commas only separate thousands
_NUMBER = r"(?:(?<![\w)])-(?:\\?\$)?)?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_BRACES = r"\s*(?:\{\s*(-?\d+)\s*\}|(\d))"
# 3/4, \frac{3}{4} or \frac34, with or without a whole number before it
_FRACTION = rf"(-?)(?:(\d+)\s+(\d+)/(\d+)|()(\d+)/(\d+)|(\d*)\s*\\[dt]?frac{_BRACES}{_BRACES})"
# 1.5e3 and 1.5 \times 10^{3}
_POWER = re.compile(
    r"(-?\d+(?:\.\d+)?)\s*(?:[eE]|(?:\\times|\\cdot|\*)\s*10\s*\^)\s*(\{?)([-+]?\d{1,2})(\}?)"
)
_SPACED = re.compile(r"-?\d{1,3}( \d{3})+(\.\d+)?")
# a word after a number, except mathematical names such as pi and sqrt
_UNIT = re.compile(
    r"(?<=[\d}])\s+(?!(?:pi|sqrt|log|ln|sin|cos|tan|mod)\b)[A-Za-z]{2,}(?:\^\{?\d\}?)?$"
)
MOST_DIGITS = 400
_NUMBERS = re.compile(_NUMBER)
_FRACTIONS = re.compile(_FRACTION)
_BOXED = re.compile(r"\\boxed\s*\{")
_ANSWER_IS = re.compile(r"\banswer\s*(?:is|:)\s*:?", re.IGNORECASE)
# a value after markup, complete, not the first part of 3/4, 5 * 3 or 2\pi
_VALUE = re.compile(
    rf"[\s*_$=~(\\]*((?:{_FRACTION}(?![\d/]))|{_NUMBER}"
    r"(?!\d|[.,]\d|[eE]\d|[A-Za-z]?\s*[-+/^:×=]\s*[\d(\\]|\s*\*\s*[\d(]"
    r"|\s*\\(?:[dt]?frac|sqrt|pi|times|cdot|div)))"
)
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")
_COMMAND = re.compile(r"\\[A-Za-z]+")


def boxed(text: str) -> str | None:
    """Content of the last complete \\boxed{...}, braces balanced; a number as in `last_number`.

    Skips an empty one, as in the instruction to use it, and one that is cut off; None without any.
    """
    ends = _closing(text)
    for place in reversed(list(_BOXED.finditer(text))):
        begin = place.end()
        if begin - 1 in ends and (content := text[begin : ends[begin - 1]]).strip():
            return _plain(content)
    return None


def last_number(text: str) -> str | None:
    """The last number, without thousands separators or trailing zeros after the decimal point."""
    found = _NUMBERS.findall(_clean(text))
    return plain_number(found[-1]) if found else None


def stated(text: str) -> str | None:
    """Number or fraction after the last "the answer is", else the rest of the sentence.

    For an equation, its right side: 15 for "5 * 3 = 15". None if there is no such phrase.
    """
    places = list(_ANSWER_IS.finditer(text))
    if not places:
        return None
    rest = _SENTENCE_END.split(text[places[-1].end() :].lstrip(), maxsplit=1)[0]
    inside = boxed(rest)
    if inside is not None:
        return inside
    rest = _clean(rest)
    value = _VALUE.match(rest) or _VALUE.match(rest.rpartition("=")[2])
    # (3, 4) is not 3
    if value and not ("(" in value[0] and re.match(r"\s*,", value.string[value.end() :])):
        return plain_number(value[1])
    rest = re.sub(r"\\[()\[\]]", "", rest).strip(" *_$\"'.:")
    letter = re.fullmatch(r"\(\s*(\w+)\s*\)", rest)
    return letter[1] if letter else rest or None


def answer_of(text: str) -> str | None:
    """Content of \\boxed{}, else the answer after "the answer is", else the last number.

    If a sentence continues in words ("the answer is that ..."), the last number is preferred.
    """
    found = boxed(text)
    if found is None:
        found = stated(text)
        if found is None or re.search("[A-Za-z]{2}", _COMMAND.sub("", found)):
            found = last_number(text) or found
    return found


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "any": answer_of,
    "boxed": boxed,
    "number": last_number,
    "stated": stated,
}


def extractor(extract: str | Callable[[str], str | None]) -> Callable[[str], str | None]:
    """Return `extract` if it is callable, else the extractor of that name."""
    if callable(extract):
        return extract
    if not isinstance(extract, str) or extract not in EXTRACTORS:
        raise ValueError(
            f"extract must be a function or one of {', '.join(map(repr, EXTRACTORS))}, "
            f"got {shown(extract)}"
        )
    return EXTRACTORS[extract]


def plain_number(number: str) -> str:
    """Normalise a number: 1,234.50 and 1234.5 are 1234.5; 007 is 7; -0 is 0."""
    if not _NUMBERS.fullmatch(number):
        return number
    sign, digits = ("-", number[1:].lstrip("\\$")) if number[0] == "-" else ("", number)
    whole, _, part = digits.replace(",", "").partition(".")
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    value = f"{whole}.{part}" if part else whole
    return value if value == "0" else sign + value


def canonical(answer: str) -> str:
    r"""Normalise an answer: LaTeX without layout, numbers and fractions as reduced fractions.

    0.5, 1/2, \frac12 and $\dfrac{1}{2}$ are 1/2, 1 1/2 is 3/2, 1.5e3 and 1 500 are 1500, and 12 cm
    and 12\text{ cm} are 12. Expressions are compared as text, so x+1 is not 1+x: equal spellings
    are equal answers, but equal answers may be spelled differently.
    """
    text = _clean(answer)
    text = re.sub(r"\\(left|right|displaystyle|[!,;: ])|~", " ", text)
    text = re.sub(r"\\?\$|\^\{?\\circ\}?|\\degree|\\?%|\\(?=$)", "", text).strip().rstrip(". ")
    text = re.sub(r"^[A-Za-z]\s*=\s*", "", text)
    # a unit after a number
    bare = re.sub(r"(?<=[\d}])\s*\\(text|textbf|mathrm|mbox|mathbf)\s*\{[^{}]*\}$", "", text)
    number = number_of(_UNIT.sub("", bare))
    if number is not None:
        return str(number)
    text = re.sub(r"\\(text|textbf|mathrm|mbox|mathbf)\s*\{([^{}]*)\}", r"\2", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    # 3 4 is not 34
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
    text = re.sub(r"^\(([A-Za-z])\)$", r"\1", text)
    return re.sub(r"\\sqrt(\d)", r"\\sqrt{\1}", text)


def number_of(text: str) -> Fraction | None:
    """Value of a number, fraction, mixed number or power of ten; None for other texts.

    None for a text of more than MOST_DIGITS characters.
    """
    if len(text) > MOST_DIGITS:
        return None
    if _SPACED.fullmatch(text):
        text = text.replace(" ", "")
    if _NUMBERS.fullmatch(text):
        return Fraction(plain_number(text))
    power = _POWER.fullmatch(text)
    if power is not None and bool(power[2]) == bool(power[4]):
        return Fraction(power[1]) * Fraction(10) ** int(power[3])
    found = _FRACTIONS.fullmatch(text)
    if found is None:
        return None
    sign, *parts = found.groups()
    given = [int(part) for part in parts if part]
    top, bottom = given[-2:]
    if not bottom:
        return None
    return (sum(given[:-2]) + Fraction(top, bottom)) * (-1 if sign else 1)


def _closing(text: str) -> dict[int, int]:
    """Maps positions of opening braces to those of their closing braces; ignores \\{ and \\}."""
    found, open_ones = {}, []
    for place in re.finditer(r"(?<!\\)[{}]", text):
        if place[0] == "{":
            open_ones.append(place.start())
        elif open_ones:
            found[open_ones.pop()] = place.start()
    return found


def _plain(answer: str) -> str:
    bare = _clean(answer).strip("$ ")
    return plain_number(bare) if _NUMBERS.fullmatch(bare) else answer.strip()


def _clean(text: str) -> str:
    """Replace the Unicode minus by "-", and 1{,}000, 1,\\!000 and 1\\,000 of LaTeX by 1,000."""
    text = text.replace("−", "-").replace("{,}", ",").replace(r"\!", "")
    return re.sub(r"(?<=\d)\\,(?=\d{3})", ",", text)
