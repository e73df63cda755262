r"""Extraction of a worked solution's answer from its text.

A text states an answer as \boxed{6}, <answer>6</answer>, "the answer is 6", "#### 6" and the like.
Thoughts are cut before it is read, and the last statement with a value is the answer.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from itertools import zip_longest

from csd.engine.options.thinking import after_thoughts
from csd.evaluate.answers.equality import WORDS
from csd.evaluate.answers.letters import option, options_in
from csd.evaluate.answers.numbers import (
    last_numeral,
    number_of,
    numeral_at,
    plain_number,
    plain_text,
)
from csd.utils.check import shown

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_TAGGED = re.compile(r"<answer>\s*((?:(?!<answer>).){1,400}?)\s*</answer>", re.I | re.S)
_SAID = re.compile(
    r"\b(?:answer(?:\s+(?:to|for|of)\s[^.:\n]{1,80}?)?|(?:correct|right|best) (?:option|choice))"
    r"[*_]*\s*(?:(?:is|=|equals|would be|should be|must be)(?!\w|n['’]t)|:)[*_]*\s*:?",
    re.IGNORECASE,
)
# GSM8K's mark, but not a heading
_MARKED = re.compile(r"^#### +(.+)$", re.MULTILINE)
# words between "is" and the value
_ADVERBS = re.compile(
    r"[\s*_]*(?:(?:therefore|thus|then|hence|so|simply|clearly|indeed|just|now|still|also|exactly|"
    r"about|approximately|probably|equal to|given by|option|choice|letter)[\s:*_]+)+",
    re.IGNORECASE,
)
_MARKUP = re.compile(r"[\s*_$=~(\\]*")
# text behind a number that begins an expression or a list, such as 5 * 3, 2\pi, 5 < x, 3 and 4
_GOES_ON = re.compile(
    r"\d|[.,]\d|[eE]\d|[abiknpqruvxyz](?![A-Za-z])|[A-Za-z]?\s*[-+/^:×=]\s*[\d({\\]|\s*\*\s*[\d(]"
    r"|\s*\\(?:[dt]?frac|sqrt|pi|times|cdot|div|pm|[gl]e|neq?)|\s*(?:!=|[<>±≤≥≠])"
    r"|_[\d{]|\$?\s*(?:,|\b(?:and|or)\b)(?:[^A-Za-z]|\b(?:and|or)\b)*\d[^A-Za-z]*$"
)
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_DATE = re.compile(
    rf"(?:{_MONTH} {_DAY}|{_DAY}(?: of)? {_MONTH})\b(?:,? \d{{4}}\b)?|{_MONTH} \d{{4}}\b"
)
# not between the initials of a name
_SENTENCE_END = re.compile(
    r"\n|(?<!\\)[!?](?=\s|$)|(?:(?<!\b[A-Z])|(?!\.\s[A-Z]\.)(?<![A-Z]\.\s[A-Z]))\.(?=\s|$)"
)
_DENIAL = re.compile(r"[\s*_]*not\b", re.IGNORECASE)
_COMMAND = re.compile(r"\\(?:begin|end)\s*\{[a-z]+\}|\\[A-Za-z]+|\b(?:and|or)\b")
# several equations, as in x = 1 or x = 2
_UNKNOWNS = re.compile(r"\b[A-Za-z]\s*=[^=]*?(?:[,;]|\b(?:and|or)\b)[\s$\\(]*[A-Za-z]\s*=[^=]*$")
# words that a value may be: a name, or a yes or no
_NAME = re.compile(r"(?!(?:I|We|It|The|That|This|There|You)\b)[A-Z]|(?:yes|no|true|false)\b")


class Answer(str):
    """An answer, with the text that begins with it, which may have its unit or its name."""

    stated: str

    def __new__(cls, value: str, stated: str = "") -> "Answer":
        answer = super().__new__(cls, value)
        answer.stated = stated
        return answer


@dataclass(frozen=True, slots=True)
class Statement:
    start: int
    value: str
    stated: str  # the text that begins with the value
    words: bool = False  # prose, which may be no value

    @property
    def answer(self) -> Answer:
        return Answer(self.value, self.stated)


def cut_thoughts(read: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """An extractor that reads the text after a model's thoughts."""

    @wraps(read)
    def read_answer(text: str) -> str | None:
        return read(after_thoughts(text))

    return read_answer


@cut_thoughts
def boxed(text: str) -> str | None:
    """Content of the last complete \\boxed{...}, braces balanced; a number as in `last_number`.

    Skips an empty one, as in the instruction to use it, and one that is cut off; None without any.
    """
    contents = [content for _, _, content in _boxes(text)]
    return Answer(_content(contents[-1]), contents[-1]) if contents else None


@cut_thoughts
def last_number(text: str) -> str | None:
    """The last number, without thousands separators or trailing zeros after the decimal point.

    None if the last digits fit no convention of `csd.evaluate.answers.numbers`.
    """
    return last_numeral(plain_text(text))


@cut_thoughts
def stated(text: str) -> str | None:
    """Number, fraction or letter after the last "the answer is", else the rest of the sentence.

    For an equation, its right side: 15 for "5 * 3 = 15". None if there is no such phrase. A
    sentence that continues in words counts only where none has a value.
    """
    statements = [*_statements_in(text)]
    values = [statement for statement in statements if not statement.words] or statements
    return values[-1].answer if values else None


@cut_thoughts
def letter(text: str) -> str | None:
    """Letter of the option that the last statement names, else the last option such as (B)."""
    explicit = ((start, content) for start, content, _ in _explicit(text))
    for _, content in sorted([*explicit, *_sentences(text)], reverse=True):
        named = option(content, small=True)
        if named is not None:
            return named
        if letters := set(options_in(content)):
            # two options are no answer
            return letters.pop() if len(letters) == 1 else None
    return option(text, small=True) or next(reversed(options_in(text)), None)


@cut_thoughts
def answer_of(text: str) -> str | None:
    """Value of the last statement, boxed or in a sentence, else the last number.

    If all statements continue in words ("the answer is that ..."), a name, yes or no is the answer,
    else the last number, else the words.
    """
    statements = [
        Statement(start, value, stated)
        for start, content, stated in _explicit(text)
        if (value := _content(content))
    ]
    spans = [(start, end) for start, end, _ in _boxes(text)]
    in_sentences = [
        s for s in _statements_in(text) if not any(start < s.start < end for start, end in spans)
    ]
    values = [s for s in [*statements, *in_sentences] if not s.words]
    if values:
        return max(values, key=lambda s: s.start).answer
    words = in_sentences[-1].value if in_sentences else None
    if words is not None and _NAME.match(words) and not re.search(r"\d", words):
        return words
    for _, sentence in _sentences(text, denied=True):
        text = text.replace(sentence, "")
    return (None if in_sentences else option(text)) or last_numeral(plain_text(text)) or words


def _explicit(text: str) -> Iterator[tuple[int, str, str]]:
    """Beginning, content and text of each statement in a form of its own."""
    for start, _, content in _boxes(text):
        yield start, content, content
    for match in _TAGGED.finditer(text):
        yield match.start(), _number_in_words(match[1]) or match[1], match[1]
    for match in _MARKED.finditer(text):
        number = _number_in(plain_text(match[1]))
        if number is not None and re.fullmatch(r"[\s.%$*]*|\s+[A-Za-z]+", number[1]):
            yield match.start(), number[0], match[1]


def _boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """Beginning, end and content of each complete box that is not empty."""
    ends = _closing(text)
    for match in _BOXED.finditer(text):
        begin = match.end()
        if begin - 1 in ends and (content := text[begin : ends[begin - 1]]).strip():
            yield match.start(), ends[begin - 1], content


def _sentences(text: str, denied: bool = False) -> Iterator[tuple[int, str]]:
    """Beginning of each "the answer is", and the rest of its sentence.

    denied: whether to take the questions and denials instead of the others.
    """
    phrases = [*_SAID.finditer(text)]
    for match, following in zip_longest(phrases, phrases[1:]):
        last = following.start() if following else len(text)
        rest = text[match.end() : last].lstrip()
        end = _SENTENCE_END.search(rest)
        rest = rest[: end.start()] if end else rest
        if denied == bool(_DENIAL.match(rest) or (end and end[0] == "?")):
            yield match.start(), rest


def _statements_in(text: str) -> Iterator[Statement]:
    for start, rest in _sentences(text):
        inside = [content for _, _, content in _boxes(rest)]
        if inside:
            yield Statement(start, _content(inside[-1]), inside[-1])
            continue
        # a box that is cut off
        if _BOXED.search(rest):
            continue
        adverbs = _ADVERBS.match(rest)
        rest = plain_text(rest[adverbs.end() :] if adverbs else rest)
        date = _DATE.match(rest.lstrip(" *_"))
        number = _number_in(rest)
        if number is None and not _UNKNOWNS.search(rest):
            number = _number_in(rest.rpartition("=")[2])
        value = (date and date[0]) or option(rest) or (number and number[0])
        if value:
            yield Statement(start, value, rest)
            continue
        rest = re.sub(r"\\[()\[\]]", "", rest).strip(" *_$\"'.:")
        name = re.fullmatch(r"\(\s*(\w+)\s*\)", rest)
        rest = name[1] if name else rest
        if rest:
            yield Statement(start, rest, rest, _in_words(rest))


def _in_words(text: str) -> bool:
    """True for prose, as opposed to a number, a letter, an expression or a list of these."""
    return bool(re.search("[A-Za-z]{2}", _COMMAND.sub("", text)))


def _number_in_words(text: str) -> str | None:
    """The last number of prose that is no date."""
    prose = _in_words(text) and not _DATE.fullmatch(text.strip(" .*"))
    return last_numeral(plain_text(text)) if prose else None


def _number_in(text: str) -> tuple[str, str] | None:
    """The number that a plain text begins with, behind markup, and the rest of the text."""
    markup = _MARKUP.match(text)
    start = markup.end() if markup else 0
    number = numeral_at(text, start)
    if number is None and text[:start].endswith("\\") and text[start:].startswith("frac"):
        number = numeral_at(text, start - 1)
    if number is None or number.spelling is None or _GOES_ON.match(text, number.end):
        return None
    rest = text[number.end :]
    # (3, 4) is not 3
    if "(" in text[:start] and re.match(r"\s*,", rest):
        return None
    return number.spelling, rest


def _content(content: str) -> str:
    """Value of what a box holds: words without LaTeX's markup, and the letter of an option."""
    words = re.fullmatch(rf"\s*{WORDS}[\s.]*", content)
    if words and (in_sentences := list(_statements_in(words[1]))):
        return in_sentences[-1].value
    bare = plain_text(content).strip("$ ")
    if number_of(bare) is not None:
        return plain_number(bare) if "frac" not in bare and "/" not in bare else content.strip()
    return option(content) or content.strip()


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "any": answer_of,
    "boxed": boxed,
    "letter": letter,
    "number": last_number,
    "stated": stated,
}


def extractor(extract: str | Callable[[str], str | None]) -> Callable[[str], str | None]:
    """Return `extract` with a check of its results if it is callable, else the extractor of that
    name."""
    if callable(extract):
        return extract if extract in EXTRACTORS.values() else _checked(extract)
    if not isinstance(extract, str) or extract not in EXTRACTORS:
        raise ValueError(
            f"extract must be a function or one of {', '.join(map(repr, EXTRACTORS))}, "
            f"got {shown(extract)}"
        )
    return EXTRACTORS[extract]


def _checked(extract: Callable[[str], str | None]) -> Callable[[str], str | None]:
    def checked(text: str) -> str | None:
        answer = extract(text)
        if not isinstance(answer, str | None):
            raise TypeError(
                f"extract must return a str or None, got {shown(answer)} of type "
                f"{type(answer).__name__}: return str() of it"
            )
        return answer

    return checked


def _closing(text: str) -> dict[int, int]:
    """Maps positions of opening braces to those of their closing braces; ignores \\{ and \\}."""
    closing, open_ones = {}, []
    for match in re.finditer(r"(?<!\\)[{}]", text):
        if match[0] == "{":
            open_ones.append(match.start())
        elif open_ones:
            closing[open_ones.pop()] = match.start()
    return closing
