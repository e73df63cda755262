r"""Units and names beside the number of an answer, which tell it from others of the same value.

    $5, 5 dollars     $        5\%, 5 percent     %
    5 hours, 5 hrs    hour     x = 3, x_1 = 3     x, x_1

Units are those of a table, whose quantities differ; "12 apples" and "12 fruits" have none. A power,
as in cm^2, is left out: samples differ in it where they mean the same.
"""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from csd.evaluate.answers.numbers import number_of, numeral_at, plain_text

# unit -> its spellings, without the s of a plural
_SPELLINGS = {
    "$": "$ dollar usd buck",
    "cent": "cent ¢",
    "euro": "€ euro eur",
    "pound": "£ pound lb lbs gbp",
    "yen": "¥ yen",
    "rupee": "₹ rupee rs",
    "%": r"% \% percent pct",
    "degree": "degree deg °",
    "radian": "radian rad",
    "second": "second sec s",
    "minute": "minute min",
    "hour": "hour hr h",
    "day": "day",
    "week": "week wk",
    "month": "month",
    "year": "year yr",
    "mm": "mm millimeter millimetre",
    "cm": "cm centimeter centimetre",
    "m": "m meter metre",
    "km": "km kilometer kilometre",
    "inch": "inch inche",
    "foot": "foot feet ft",
    "yard": "yard yd",
    "mile": "mile mi",
    "mg": "mg milligram",
    "g": "g gram",
    "kg": "kg kilogram kilo",
    "ounce": "ounce oz",
    "ton": "ton tonne",
    "ml": "ml milliliter millilitre",
    "l": "l liter litre",
    "gallon": "gallon gal",
}
_UNITS = {spelling: unit for unit, listed in _SPELLINGS.items() for spelling in listed.split()}
_MONEY = "$€£¥₹"
_BOX = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*(?=\{)"
# what may stand before a number
_FRONT = re.compile(rf"(?:{_BOX}|[-+\s*_({{~$€£¥₹]|\\(?![dt]?frac))*")
# LaTeX and markup around a unit, and words before it
_BETWEEN = re.compile(
    rf"(?:[\s~{{}}$*]|\\[,;: !)]|{_BOX}|(?:square|sq\.?|cubic|more|additional|total|whole|full)\b)*"
)
_WORD = re.compile(r"\\?%|[°¢€£¥₹]|\^\s*\{?\\circ|\\degree|[A-Za-z]+")
# a name of one letter, with an index or an argument
_NAME = re.compile(r"[\s*_$(\\]*([A-Za-z](?:_\{?\w+\}?)?)(?:\([A-Za-z]\))?\s*=(?!=)")


@dataclass(frozen=True, slots=True)
class Labels:
    unit: str | None = None
    name: str | None = None


def labels_of(text: str) -> Labels:
    """Unit and name of an answer, by the text in which it stands, which begins with it."""
    text = plain_text(text)
    named = _NAME.match(text)
    front = _FRONT.match(text, named.end() if named else 0)
    signs, begin = (front[0], front.end()) if front else ("", 0)
    # a dollar sign that another one closes is mathematics
    money = re.sub(r"(?<!\\)\$", "", signs) if text.count("$") - text.count(r"\$") > 1 else signs
    unit = next((_UNITS[sign] for sign in _MONEY if sign in money), None)
    number = numeral_at(text, begin)
    if number is not None and unit is None:
        between = _BETWEEN.match(text, number.end)
        word = _WORD.match(text, between.end() if between else number.end)
        unit = None if word is None else _unit_of(word[0])
    return Labels(unit if number else None, re.sub("[{}]", "", named[1]) if named else None)


def _unit_of(word: str) -> str | None:
    if word.startswith(("^", r"\degree")):
        return "degree"
    word = word.lower() if len(word) > 1 else word
    return _UNITS.get(word) or (_UNITS.get(word.removesuffix("s")) if len(word) > 2 else None)


class Key(NamedTuple):
    """An answer's value, and the unit or name that separates it from the value's first answer."""

    value: str
    unit: str = ""
    name: str = ""

    def spelling(self, answer: str) -> str:
        """The answer with its unit and name, so that it differs from the value's first answer."""
        if self.unit:
            # a letter alone would be a factor
            letter = len(self.unit) == 1 and self.unit.isalpha()
            answer += rf"\text{{ {self.unit}}}" if letter else f" {self.unit}"
        return f"{self.name} = {answer}" if self.name else answer


@dataclass(slots=True)
class Answers:
    """Answers of a prompt's samples in their order, as keys that are equal for equal answers.

    The first unit of a value is that of all its answers without one, and so is the first name. So
    the key of an answer is the same whatever follows it.
    """

    units: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def key(self, value: str, labels: Labels) -> Key:
        """Key of the next answer; a function has one, whatever its name is."""
        unit, name = labels.unit or "", labels.name or ""
        if number_of(value) is None:
            return Key(value)
        if not unit or self.units.setdefault(value, unit) == unit:
            unit = ""
        if not name or self.names.setdefault(value, name) == name:
            name = ""
        return Key(value, unit, name)
