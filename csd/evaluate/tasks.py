"""Problem files: questions, correct answers and their comparison."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from csd.evaluate.answers import canonical, canonical_answer, letter
from csd.evaluate.letters import option
from csd.evaluate.numbers import number_of
from csd.models.text.prompts import check_prompt
from csd.utils.check import fits, shown
from csd.utils.json_files import naming, read_lines


@dataclass(frozen=True, slots=True)
class Problem:
    index: int  # line of the file, from 0
    prompt: str | list[dict]
    answer: str  # in the form that `Task.extract` returns


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of problem file. question, answer: keys of a line.

    ask: instruction appended to the question. gold: returns the canonical form of a line's answer,
    or raises ValueError. extract: returns the canonical answer in a sample's text, or None.
    """

    question: str
    answer: str
    ask: str
    gold: Callable[[str], str]
    extract: Callable[[str], str | None]


def read(path: str | Path, task: Task) -> list[Problem]:
    """Read the problems of a JSONL file. Raises ValueError, naming the line and the key."""
    problems: list[Problem] = []
    for number, row in read_lines(path, dict):
        with naming(f"{path}, line {number}"):
            problems.append(_problem(row, len(problems), task))
    if not problems:
        raise ValueError(f"{path} has no problems")
    return problems


def _problem(row: dict, index: int, task: Task) -> Problem:
    for key in (task.question, task.answer):
        if key not in row:
            raise ValueError(f"has no {key!r}")
    prompt, answer = row[task.question], row[task.answer]
    check_prompt(prompt, task.question)
    if not fits(answer, str | int | float):
        raise ValueError(f"must have a string or a number as {task.answer!r}, got {shown(answer)}")
    if isinstance(prompt, str):
        prompt += task.ask
    return Problem(index, prompt, task.gold(str(answer)))


def _gsm8k_gold(answer: str) -> str:
    found = answer.rpartition("####")[2].strip()
    if number_of(found) is None:
        raise ValueError(
            f"must have an 'answer' that ends in #### and a number, got {answer[-40:]!r}"
        )
    return canonical(found)


def _letter_gold(answer: str) -> str:
    named = option(answer, small=True)
    if named is None:
        raise ValueError(
            f"must have the letter of an option, A to J, as 'answer', got {shown(answer)}; "
            "answers in words need --task jsonl"
        )
    return named


TASKS = {
    "gsm8k": Task(
        "question",
        "answer",
        '\n\nReason step by step, then end with "The answer is" and the number.',
        _gsm8k_gold,
        canonical_answer,
    ),
    "math": Task(
        "problem",
        "answer",
        "\n\nReason step by step, and put the final answer within \\boxed{}.",
        canonical,
        canonical_answer,
    ),
    # a question with its options
    "letter": Task(
        "question",
        "answer",
        '\n\nReason step by step, then end with "The answer is" and the letter.',
        _letter_gold,
        letter,
    ),
    # prompt: a str or messages, used unchanged
    "jsonl": Task("prompt", "answer", "", canonical, canonical_answer),
}
