"""Files of problems: what is asked, what is right, and when two answers are the same."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from csd.answers import answer_of, plain_number


@dataclass(frozen=True, slots=True)
class Problem:
    index: int  # line of the file, from 0
    prompt: str | list[dict]
    answer: str  # as `Task.extract` writes it


@dataclass(frozen=True, slots=True)
class Task:
    """question, answer: keys of a line. ask: what is put after the question."""

    question: str
    answer: str
    ask: str
    gold: Callable[[str], str]
    extract: Callable[[str], str | None]


def read(path: str | Path, task: Task) -> list[Problem]:
    """The problems of a JSONL file. Raises ValueError that names the line and the key."""
    problems: list[Problem] = []
    with open(path, encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
            for key in (task.question, task.answer):
                if not isinstance(row, dict) or key not in row:
                    raise ValueError(f"{path}, line {number} has no {key!r}")
            prompt = row[task.question]
            if isinstance(prompt, str):
                prompt += task.ask
            problems.append(Problem(len(problems), prompt, task.gold(str(row[task.answer]))))
    if not problems:
        raise ValueError(f"{path} holds no problems")
    return problems


def canonical(answer: str) -> str:
    r"""One spelling an answer: LaTeX without layout, numbers and fractions as reduced fractions.

    0.5, 1/2, \frac12 and $\dfrac{1}{2}$ are 1/2. Expressions are compared as text, so x+1 is not
    1+x: what this calls equal is equal, not the other way round.
    """
    text = answer.replace("−", "-")
    text = re.sub(r"\\(left|right|displaystyle|[!,;: ])|\\?\$|~", "", text)
    text = re.sub(r"\\(text|textbf|mathrm|mbox|mathbf)\s*\{([^{}]*)\}", r"\2", text)
    text = re.sub(r"\^\{?\\circ\}?|\\degree|\\%|%|\\(?=$)", "", text)
    text = re.sub(r"\s+", "", text).rstrip(".")
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt(\d)", r"\\sqrt{\1}", text)
    text = re.sub(r"^[A-Za-z]=", "", text)
    return _number(text) or text


_FRACTION = re.compile(r"(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}|(-?)(\d+)/(\d+)")
_DECIMAL = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")


def _number(text: str) -> str | None:
    found = _FRACTION.fullmatch(text)
    if found:
        sign, top, bottom = found.group(1, 2, 3) if found[2] else found.group(4, 5, 6)
        if int(bottom):
            return str(Fraction(int(top), int(bottom)) * (-1 if sign else 1))
    elif _DECIMAL.fullmatch(text) and any(c.isdigit() for c in text):
        return str(Fraction(plain_number(text)))
    return None


def _gsm8k_gold(answer: str) -> str:
    return canonical(answer.rpartition("####")[2].strip())


def _extract(text: str) -> str | None:
    found = answer_of(text)
    return None if found is None else canonical(found)


TASKS = {
    "gsm8k": Task(
        "question",
        "answer",
        '\n\nReason step by step, then end with "The answer is" and the number.',
        _gsm8k_gold,
        _extract,
    ),
    "math": Task(
        "problem",
        "answer",
        "\n\nReason step by step, and put the final answer within \\boxed{}.",
        canonical,
        _extract,
    ),
    # prompt: a str or messages, taken as they are
    "jsonl": Task("prompt", "answer", "", canonical, _extract),
}
