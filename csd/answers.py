"""What a worked solution concludes, and when two conclusions are the same."""

import re
from collections.abc import Callable

# a sign counts where it is not a minus between two numbers; commas only as thousands separators
_NUMBER = r"(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_NUMBERS = re.compile(_NUMBER)
_ANSWER_IS = re.compile(r"\banswer\s*(?:is|:)\s*:?", re.IGNORECASE)
# markup between "the answer is" and a number
_LEADING_NUMBER = re.compile(rf"[\s*_$=~(\\]*({_NUMBER})")
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")


def boxed(text: str) -> str | None:
    """Content of the last \\boxed{...}, braces balanced; a number as `last_number` writes it."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for i in range(begin, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return _plain(text[begin + 1 : i])
    return None


def last_number(text: str) -> str | None:
    """The last number, without thousands separators and trailing zeros after the point."""
    found = _NUMBERS.findall(_minus(text))
    return plain_number(found[-1]) if found else None


def stated(text: str) -> str | None:
    """What follows the last "the answer is": its number, else the rest of the sentence."""
    text = _minus(text)
    places = list(_ANSWER_IS.finditer(text))
    if not places:
        return None
    rest = text[places[-1].end() :]
    number = _LEADING_NUMBER.match(rest)
    if number:
        return plain_number(number[1])
    rest = _SENTENCE_END.split(rest.lstrip(), maxsplit=1)[0]
    return rest.strip(" *_$()\"'.:") or None


def answer_of(text: str) -> str | None:
    """\\boxed{}, else the number after "the answer is", else the last number.

    A sentence that goes on in words ("the answer is that ...") does not hide a later number.
    """
    found = boxed(text)
    if found is None:
        found = stated(text)
        if found is None or not _NUMBERS.fullmatch(found):
            found = last_number(text) or found
    return found


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "any": answer_of,
    "boxed": boxed,
    "number": last_number,
    "stated": stated,
}


def extractor(extract: str | Callable[[str], str | None]) -> Callable[[str], str | None]:
    """`extract` itself if it can be called, else the extractor of that name."""
    if callable(extract):
        return extract
    if extract not in EXTRACTORS:
        raise ValueError(
            f"extract must be a function or one of {', '.join(map(repr, EXTRACTORS))}, "
            f"got {extract!r}"
        )
    return EXTRACTORS[extract]


def plain_number(number: str) -> str:
    """One spelling a number: 1,234.50 and 1234.5 are 1234.5; 007 is 7; -0 is 0."""
    sign, digits = ("-", number[1:]) if number.startswith("-") else ("", number)
    whole, _, part = digits.replace(",", "").partition(".")
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    value = f"{whole}.{part}" if part else whole
    return value if value == "0" else sign + value


def _plain(answer: str) -> str:
    answer = answer.strip()
    bare = _minus(answer).strip("$ ")
    return plain_number(bare) if _NUMBERS.fullmatch(bare) else answer


def _minus(text: str) -> str:
    return text.replace("−", "-")
