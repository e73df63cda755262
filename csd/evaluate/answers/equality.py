r"""Equal answers: `canonical` returns one text for all spellings of an answer.

    number          its decimals, else its reduced fraction    12 cm, $12, 12.0, 24/2     12
    option          its letter                                 (b), B: Paris              B
    yes, Paris      its words, in small letters                \text{Yes}, YES.           yes
    set, list       its entries sorted, each once in a set     \{2, 1\}, 1 and 2          {1, 2}
    pair, interval  its entries and brackets                   x\in[-2,7], -2\le x\le 7   [-2, 7]
    expression      its values (see `expressions`)             x^{2}, x\cdot x

Units, currencies, percent and degree signs, and the name before an equals sign are left out. A text
that is none of these is itself, without layout and capitals.
"""

import re
from functools import lru_cache

from csd.evaluate.answers.expressions import multiple, value
from csd.evaluate.answers.letters import option
from csd.evaluate.answers.numbers import number_of, plain_text, spelled

WORDS = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"
_LIMIT = 400  # characters of a text that is more than itself
_DEPTH = 8
_FUNCTIONS = "sqrt|pi|sin|cos|tan|log|ln|exp"
# the last word, unless it is mathematics
_UNIT = re.compile(
    rf"(?:\s+(?!(?:{_FUNCTIONS}|mod|and|or)\b)[A-Za-z]{{2,}}|\s*{WORDS})(?:\^\{{?\d\}}?)?$"
)
_LAYOUT = re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])|(?<!\\)\\[!,;: ()]|~|[`*\"]")
_SIGNS = re.compile(
    r"\\?[$£€¥₹]|(?:°|\^\s*\{?\\circ\}?|\\degree|\s*\bdegrees$)(?:\s*[CF]\b)?|\\?%|\s*\bpercent$"
)
_UNICODE = {
    **{"π": r"\pi ", "∞": r"\infty ", "±": r"\pm ", "×": r"\times ", "·": r"\cdot ", "÷": r"\div "},
    **{"≤": "<=", "≥": ">=", "≠": "!=", "≈": "=", "∈": r"\in ", "∪": r"\cup ", "∅": r"\emptyset "},
    **{"√": r"\sqrt ", "²": "^2", "³": "^3", "⟨": "(", "⟩": ")"},
}
_TABLE = str.maketrans(_UNICODE)
_JOINED = re.compile(r"\\text\s*\{\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|[;,]")
_EITHER = re.compile(r"\\pm(?![A-Za-z])")
_UNION = re.compile(r"\\cup(?![A-Za-z])")
_RELATION = re.compile(r"\\(?:leq?|geq?|lt|gt|neq?|approx|in)(?![A-Za-z])|[<>!]?=|[<>]")
_SPELLED = {r"\le": "<=", r"\leq": "<=", r"\ge": ">=", r"\geq": ">=", r"\lt": "<", r"\gt": ">"}
_SPELLED |= {r"\ne": "!=", r"\neq": "!=", r"\approx": "="}
_TURNED = {">": "<", ">=": "<="}
_MATRIX = re.compile(r"\\begin\{[pb]matrix\}(.*)\\end\{[pb]matrix\}", re.DOTALL)
# the name before an equals sign: x, x_1, f(x), AB, Area
_NAME = re.compile(r"\\?(?:[A-Za-z]|[A-Z]{2,}|[A-Za-z]{3,})(?:_\{?\w+\}?)?'?(?:\([A-Za-z]\))?")


@lru_cache(maxsize=4096)
def canonical(answer: str) -> str:
    """Canonical form of an answer, in the form that the module describes: equal answers have one.

    It is a function of the answer alone, and bounded in time. Answers of different forms in the
    same words, such as 2x and x+x, are equal; so are (1, 2) as a pair and as an open interval.

    Raises ImportError for an expression, where the package that reads one is not installed.
    """
    return _canonical(answer, 0)


def _canonical(answer: str, depth: int) -> str:
    text = plain_text(answer).strip()
    if (number := number_of(text)) is not None:
        return spelled(number)
    if len(text) > _LIMIT or depth > _DEPTH:
        return " ".join(text.split()).casefold()
    text = _SIGNS.sub("", _LAYOUT.sub(" ", text)).strip().rstrip(". ")
    words = re.fullmatch(WORDS, text)
    text = words[1].strip(" .") if words else text
    if (named := option(text, small=True)) is not None:
        return named
    bare = text
    # a number of so many things
    for _ in range(4):
        if (number := number_of(bare)) is not None:
            return spelled(number)
        bare, longer = _UNIT.sub("", bare), bare
        if bare == longer:
            break
    text = text.translate(_TABLE).replace(r"\langle", "(").replace(r"\rangle", ")").strip()
    return _form(text, depth + 1) or _plain(text)


def _form(text: str, depth: int) -> str | None:
    """Form of what has parts, or of an expression; None for words."""

    def form(part: str) -> str:
        return _canonical(part, depth)

    parts = _entries(text)
    if len(parts) > 1:
        return _set(sorted(map(form, parts)))
    parts, _ = _split(text, _UNION)
    if len(parts) > 1:
        return " or ".join(sorted(map(form, parts)))
    parts, signs = _split(text, _RELATION)
    if signs:
        return _relation(parts, [_SPELLED.get(sign, sign) for sign in signs], depth)
    if matrix := _MATRIX.fullmatch(text):
        rows = [row.split("&") for row in matrix[1].split(r"\\") if row.strip()]
        return "; ".join(", ".join(map(form, row)) for row in rows).join(("matrix(", ")"))
    if text in (r"\emptyset", r"\varnothing"):
        return "{}"
    if infinite := re.fullmatch(r"([-+]?)\s*\\infty", text):
        return infinite[1].strip("+") + "oo"
    if enclosed := _enclosed(text):
        begin, inner, end = enclosed
        entries = [form(part) for part in _entries(inner)]
        if begin == "{":
            return _set(sorted({*entries}))
        return f"{begin}{', '.join(entries)}{end}" if len(entries) > 1 else form(inner)
    text = re.sub(rf"(?<![A-Za-z\\])(?=(?:{_FUNCTIONS})(?![A-Za-z]))", r"\\", text)
    text = _UNIT.sub("", text)
    # words are no products of letters
    if re.search(WORDS, text) or re.search(
        r"[A-Za-z]{3}|^[A-Za-z]*$", re.sub(r"\\[A-Za-z]+", " ", text)
    ):
        return None
    return value(text)


def _entries(text: str) -> list[str]:
    """Entries of a list; both values of a plus or minus."""
    entries = []
    for part in _split(text, _JOINED)[0]:
        terms, _ = _split(part, _EITHER)
        entries += [sign.join(terms) for sign in "+-"] if len(terms) == 2 else [part]
    return [entry for entry in entries if entry]


def _split(text: str, pattern: re.Pattern) -> tuple[list[str], list[str]]:
    """Parts of a text and what separates them, outside of all brackets."""
    parts, signs, begin, depth, end = [], [], 0, 0, 0
    for match in pattern.finditer(text):
        between = text[end : match.start()]
        depth += sum(map(between.count, "([{")) - sum(map(between.count, ")]}"))
        end = match.end()
        if depth <= 0:
            parts.append(text[begin : match.start()].strip())
            signs.append(match[0])
            begin = end
    return [*parts, text[begin:].strip()], signs


def _enclosed(text: str) -> tuple[str, str, str] | None:
    """Brackets around all of a text, and what is inside; begin and end may differ, as in [0, 1)."""
    text = text.removeprefix("\\")
    if len(text) < 2 or text[0] not in "([{" or text[-1] not in ")]}":
        return None
    depth = 0
    for character in text[:-1]:
        depth += (character in "([{") - (character in ")]}")
        if not depth:
            return None
    return text[0], text[1:-1].removesuffix("\\").strip(), text[-1]


def _set(entries: list[str]) -> str:
    return entries[0] if len(entries) == 1 else ", ".join(entries).join("{}")


def _relation(sides: list[str], signs: list[str], depth: int) -> str:
    """Form of an equation, an inequality or a chain of them."""
    if all(sign in _TURNED for sign in signs):
        sides, signs = sides[::-1], [_TURNED[sign] for sign in reversed(signs)]
    forms = [_canonical(side, depth) for side in sides]
    if signs == [r"\in"]:
        return forms[1]
    named = [
        bool(_NAME.fullmatch(side)) or form.isalpha()
        for side, form in zip(sides, forms, strict=True)
    ]
    if {*signs} == {"="}:
        if len(sides) > 2 or named[0] or all(map(_is_constant, forms)):
            return forms[0] if named[-1] and not named[0] else forms[-1]
        if named[1]:
            return forms[0]
    elif {*signs} <= {"<", "<="}:
        begins, ends = "(["[signs[0] == "<="], ")]"[signs[-1] == "<="]
        # the values of a symbol are an interval
        if len(sides) == 3 and named[1]:
            return f"{begins}{forms[0]}, {forms[2]}{ends}"
        if len(sides) == 2 and named[0] and _is_constant(forms[1]):
            return f"(-oo, {forms[1]}{ends}"
        if len(sides) == 2 and named[1] and _is_constant(forms[0]):
            return f"{begins}{forms[0]}, oo)"
    if len(sides) == 2 and not all(map(_is_constant, forms)):
        # 2x + 2y = 10 is x + y = 5
        same = multiple(f"{sides[0]}-({sides[1]})", positive=signs[0] not in ("=", "!="))
        if same is not None:
            return f"{same} {signs[0]} 0"
    return "".join(f"{form} {sign} " for form, sign in zip(forms, signs, strict=False)) + forms[-1]


def _is_constant(form: str) -> bool:
    return ";" not in form and not form.isalpha()


def _plain(text: str) -> str:
    """Words, and what could not be read, without layout."""
    text = re.sub(WORDS, r"\1", text)
    text = re.sub(r"([_^])\s*\{(\w)\}", r"\1\2", text)
    # 3 4 is not 34
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text).strip("'_").casefold()
