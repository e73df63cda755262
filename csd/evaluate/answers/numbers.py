r"""Numbers in texts: how their digits are grouped, fractions, powers of ten, and their values.

A group of digits is read by the conventions below. One that fits none of them, such as 1,00,00,
makes no number, nor does 3,5, which is a pair or has decimals.

| digits | convention |
|---|---|
| 1234.5 | none |
| 1,234,567.5 | English |
| 12,34,567.5 | Indian |
| 1.234.567,5 | continental |
| 1 234 567.5 and 1 234 567,5 | SI, with any kind of space |
| 1'234'567.5 | Swiss |
| 1_234_567 | of programs |
"""

import re
import unicodedata
from collections import deque
from dataclasses import dataclass
from fractions import Fraction

DIGIT_LIMIT = 400

_GROUPED = [
    re.compile(pattern)
    for pattern in (
        r"(?P<whole>\d+)(?:\.(?P<part>\d+))?",
        r"(?P<whole>)\.(?P<part>\d+)",
        r"(?P<whole>[1-9]\d{0,2}(?:,\d{3})+)(?:\.(?P<part>\d+))?",
        r"(?P<whole>[1-9]\d?(?:,\d\d)+,\d{3})(?:\.(?P<part>\d+))?",
        # 1.234 alone has decimals
        r"(?P<whole>[1-9]\d{0,2}(?:\.\d{3}){2,})(?:,(?P<part>\d+))?",
        r"(?P<whole>[1-9]\d{0,2}(?:\.\d{3})+),(?P<part>\d+)",
        r"(?P<whole>[1-9]\d{0,2}(?: \d{3})+)(?:[.,](?P<part>\d+))?",
        r"(?P<whole>[1-9]\d{0,2}(?:'\d{3})+)(?:\.(?P<part>\d+))?",
        r"(?P<whole>[1-9]\d{0,2}(?:_\d{3})+)(?:\.(?P<part>\d+))?",
    )
]
# entries of a list without spaces; two of them may also be a number with decimals
_LIST = re.compile(r"(?:(?:0|[1-9]\d?),){2,}(0|[1-9]\d?)")
_SCALES = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "lakh": 10**5,
    "million": 10**6,
    "crore": 10**7,
    "billion": 10**9,
    "trillion": 10**12,
}

# a minus is a sign unless it stands behind a term
_SIGN = r"(?P<sign>(?<![\w)}])[-+])?(?:\\?\$)?(?P<inner>(?<=\$)-)?"
_WHOLE = r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)"
_IN_BRACES = r"\s*(?:\{\s*(?P<%s>-?\d+)\s*\}|(?P<%s>\d))"
_NUMERAL = re.compile(
    rf"{_SIGN}(?:"
    # 3/4, \frac{3}{4} and \frac34, with or without a whole number before it
    rf"(?<![\d/.,])(?:(?P<mixed>{_WHOLE}) +)?"
    rf"(?P<top>{_WHOLE}) ?/ ?(?P<bottom>{_WHOLE})(?![\d/]|[.,]\d)"
    rf"|(?<![\d/.,])(?P<before>\d+ *)?\\[dt]?frac{_IN_BRACES % ('a', 'b')}{_IN_BRACES % ('c', 'd')}"
    r"|(?P<digits>(?<!\d)(?<!\d )[1-9]\d{0,2}(?: \d{3})+(?:[.,]\d+)?(?!\d| \d|[.,:'_]\d)"
    r"|\.?\d+(?:[.,:'_/]\d+)*)"
    # 1.5e3 and 1.5 \times 10^{3}
    r"(?:(?:[eE](?P<e>[-+]?\d{1,2})(?![\w.])"
    r"|\s*(?:\\times|\\cdot|\*|×|·)\s*10\s*\^\s*(?:\{(?P<p>[-+]?\d{1,2})\}|(?P<q>[-+]?\d{1,2})))"
    rf"| (?P<scale>{'|'.join(_SCALES)})s?\b)?"
    r")"
)
# a scale in LaTeX's words behind a number, and what follows it in them
_SCALED = re.compile(
    r"(?<=[\d}])(?:\s|~|\\[ ,;:])*\\(?:text|textrm|mathrm|mbox)\s*\{\s*"
    rf"(?P<scale>{'|'.join(_SCALES)})s?\b(?P<rest>[^{{}}]*)\}}"
)
# one half and the like, each one character
_VULGAR = "\u00bc-\u00be\u2150-\u215e\u2189"
_MINUS = str.maketrans(dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-"))
_SPACES = str.maketrans(dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2007\u2009\u202f", " "))
_OTHERS = str.maketrans({"\u2019": "'", "\u2044": "/", "\u2215": "/"})


@dataclass(frozen=True, slots=True)
class Numeral:
    """A number in a text at [start, end), in a spelling of its own; None for digits without one."""

    start: int
    end: int
    spelling: str | None


def plain_text(text: str) -> str:
    r"""Spell the signs, spaces and fractions of numbers in ASCII: "–2½" is "-2 1/2".

    LaTeX's 1{,}000, 1,\!000 and 1\,000 are 1,000, and 5\text{ million} is 5 million.
    """
    text = _SCALED.sub(_scale, text)
    text = re.sub(r"\\!\s*", "", text.replace("{,}", ","))
    text = re.sub(r"(?<=\d)\\,(?=\d{3})", ",", text)
    text = re.sub(r"(?<=\d)(?:~|\\[ ;:])(?=\d{3})", " ", text)
    if text.isascii():
        return text
    text = re.sub(rf"(?<=\d)(?=[{_VULGAR}])", " ", text)
    text = re.sub(f"[{_VULGAR}]", lambda match: unicodedata.normalize("NFKC", match[0]), text)
    text = text.translate(_MINUS).translate(_SPACES).translate(_OTHERS)
    return re.sub(r"[^\D0-9]", lambda digit: str(unicodedata.decimal(digit[0])), text)


def _scale(match: re.Match) -> str:
    rest = match["rest"].strip()
    return f" {match['scale']}" + (f"\\text{{ {rest}}}" if rest else "")


def last_numeral(text: str) -> str | None:
    """Spelling of the last number in a text that `plain_text` returned: 3 in the list 1,2,3."""
    matches = deque(_NUMERAL.finditer(text), maxlen=1)
    if not matches:
        return None
    (last,) = matches
    entries = _LIST.fullmatch(last[0])
    return entries[1] if entries else _read(last).spelling


def numeral_at(text: str, start: int) -> Numeral | None:
    """The number that begins at a position of a text that `plain_text` returned."""
    match = _NUMERAL.match(text, start)
    return None if match is None else _read(match)


def plain_number(number: str) -> str:
    """Normalise a number: 1,234.50 and 1234.5 are 1234.5; 007 is 7; -0 is 0.

    Fractions, and texts that are no number, are returned as they are.
    """
    match = _NUMERAL.fullmatch(number)
    return number if match is None else _read(match).spelling or number


def number_of(text: str) -> Fraction | None:
    """Value of a number, fraction, mixed number or power of ten; None for other texts.

    None for a text of more than DIGIT_LIMIT characters.
    """
    if len(text) > DIGIT_LIMIT:
        return None
    match = _NUMERAL.fullmatch(text)
    if match is None:
        return None
    if match["digits"] is not None:
        spelling = _read(match).spelling
        return None if spelling is None else Fraction(spelling)
    top, bottom, whole = (
        int((match[one] or match[other] or match[third] or "0").replace(",", ""))
        for one, other, third in (
            ("top", "a", "b"),
            ("bottom", "c", "d"),
            ("mixed", "before", "before"),
        )
    )
    if not bottom:
        return None
    return (whole + Fraction(top, bottom)) * (-1 if _signed(match) else 1)


def _read(match: re.Match) -> Numeral:
    if match["digits"] is None:
        return Numeral(*match.span(), match[0].removeprefix("+"))
    number = _without_groups(match["digits"])
    # 12 000 00 is not 12, 0 and 0
    behind = match.start() and re.match(r"\d 0\d", match.string[match.start() - 2 :][:4])
    if number is None or behind:
        return Numeral(*match.span(), None)
    if len(number) <= DIGIT_LIMIT:
        number = _multiplied(match, number)
    return Numeral(*match.span(), "-" + number if _signed(match) and number != "0" else number)


def _signed(match: re.Match) -> bool:
    return "-" in (match["sign"], match["inner"])


def _without_groups(digits: str) -> str | None:
    """Digits as a plain number, or None if they fit no convention."""
    for convention in _GROUPED:
        match = convention.fullmatch(digits)
        if match is not None:
            return _trimmed(re.sub(r"\D", "", match["whole"]), match["part"] or "")
    return None


def _trimmed(whole: str, part: str) -> str:
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    return f"{whole}.{part}" if part else whole


def _multiplied(match: re.Match, number: str) -> str:
    """A number times the power of ten or the scale behind it."""
    power = int(match["e"] or match["p"] or match["q"] or 0)
    factor = _SCALES.get(match["scale"] or "", 1)
    whole, _, part = number.partition(".")
    digits, decimals = str(int(whole + part) * factor), len(part) - power
    if decimals <= 0:
        return _trimmed(digits + "0" * -decimals, "")
    digits = digits.zfill(decimals + 1)
    return _trimmed(digits[:-decimals], digits[-decimals:])


def spelled(value: Fraction) -> str:
    """A number as decimals if they are finite, else as a reduced fraction: 78.73, 1/3."""
    left = value.denominator
    for factor in (2, 5):
        while left % factor == 0:
            left //= factor
    if value.denominator == 1 or left != 1:
        return str(value)
    # a finite decimal has at most as many places as its denominator has bits
    places = next(n for n in range(value.denominator.bit_length()) if not 10**n % value.denominator)
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' * (value < 0)}{digits[:-places]}.{digits[-places:]}"
