"""Files of problems: what is asked, what is right, and when two answers are the same."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from csd.answers import answer_of, canonical, number_of


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
    with open(path, encoding="utf-8-sig") as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                problems.append(_problem(row, len(problems), task))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
            except ValueError as error:
                raise ValueError(f"{path}, line {number} {error}") from error
    if not problems:
        raise ValueError(f"{path} holds no problems")
    return problems


def _problem(row: object, index: int, task: Task) -> Problem:
    if not isinstance(row, dict):
        raise ValueError(f"must be an object, got {row!r}")
    for key in (task.question, task.answer):
        if key not in row:
            raise ValueError(f"has no {key!r}")
    prompt, answer = row[task.question], row[task.answer]
    messages = isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt)
    if not messages and not (isinstance(prompt, str) and prompt.strip()):
        raise ValueError(f"must have a text or messages as {task.question!r}, got {prompt!r}")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"must have a text or a number as {task.answer!r}, got {answer!r}")
    if isinstance(prompt, str):
        prompt += task.ask
    return Problem(index, prompt, task.gold(str(answer)))


def _gsm8k_gold(answer: str) -> str:
    found = answer.rpartition("####")[2].strip()
    if number_of(found) is None:
        raise ValueError(f"must end its 'answer' in #### and a number, got {answer[-40:]!r}")
    return canonical(found)


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
