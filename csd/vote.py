"""Self-consistency: the answer most samples agree on."""

import re
from collections.abc import Callable
from dataclasses import dataclass

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_STATED = re.compile(r"answer\s*(?:is|:)\s*\**\s*\$?(-?\d[\d,]*(?:\.\d+)?)", re.IGNORECASE)


def boxed(text: str) -> str | None:
    """Content of the last \\boxed{...}, braces balanced."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for i in range(begin, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[begin + 1 : i].strip()
    return None


def last_number(text: str) -> str | None:
    """The last number, without thousands separators and trailing zeros after the point."""
    found = _NUMBER.findall(text)
    return _plain(found[-1]) if found else None


def stated_number(text: str) -> str | None:
    """The number after the last "the answer is"."""
    found = _STATED.findall(text)
    return _plain(found[-1]) if found else None


def answer_of(text: str) -> str | None:
    """What a worked solution concludes: \\boxed{}, else "the answer is", else the last number."""
    for extract in (boxed, stated_number, last_number):
        found = extract(text)
        if found is not None:
            return found
    return None


def _plain(number: str) -> str:
    number = number.replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


@dataclass(frozen=True, slots=True)
class Decision:
    answer: str | None  # None when no sample has one
    count: float  # votes, or weight, of the answer
    total: float  # of all samples that have an answer
    answers: list[str | None]  # of each sample


def vote(
    samples,
    extract: Callable[[str], str | None] = answer_of,
    weight: Callable[[object], float] | None = None,
) -> Decision:
    """Majority over the samples' answers.

    samples: what `csd.generate` returns for a prompt, or a list of `Sample`. Cancelled samples do
        not vote.
    extract: the answer in a text, None for none.
    weight: of a sample; 1 each when not given. Ties go to the answer of the lowest index.
    """
    voters = [s for s in samples if s.finish_reason != "cancelled"]
    answers = [extract(s.text) for s in voters]
    votes: dict[str, float] = {}
    for sample, answer in zip(voters, answers, strict=True):
        if answer is not None:
            votes[answer] = votes.get(answer, 0) + (1 if weight is None else weight(sample))
    if not votes:
        return Decision(None, 0, 0, answers)
    # a dict keeps insertion order and max takes the first of equals
    best = max(votes, key=votes.get)
    return Decision(best, votes[best], sum(votes.values()), answers)
