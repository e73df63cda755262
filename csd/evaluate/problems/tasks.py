"""Kinds of problem files: their questions, their correct answers, and a sample's answer.

Two answers are equal if `csd.evaluate.answers.equality.canonical` is.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from keyword import iskeyword
from pathlib import Path

from csd.evaluate.answers.extract import answer_of, letter
from csd.evaluate.answers.letters import option
from csd.evaluate.answers.numbers import number_of
from csd.evaluate.code.execute import PASSED, Suite
from csd.models.text.messages import text_of
from csd.models.text.prompts import check_prompt
from csd.utils.check import fits, shown
from csd.utils.files import naming, read_lines


@dataclass(frozen=True, slots=True)
class Problem:
    index: int  # line of the file, from 0
    prompt: str | list[dict]
    answer: str  # as the file has it, or its part that is the answer
    question: str = ""  # without instructions and worked examples
    tests: Suite | None = None  # of a program


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of problem file. question, answer: keys of a line.

    ask: instruction appended to the question. gold: returns the answer in a line's answer, or
    raises ValueError. extract: returns the answer in a sample's text, or None. shot: format of a
    question behind worked examples, which replaces `ask`. worked: key of an example's solution.
    stop: strings that end a completion behind such a question. entry_point: key of the name that
    the tests in `answer` call, for programs.
    """

    question: str
    answer: str
    ask: str
    gold: Callable[[str], str]
    extract: Callable[[str], str | None]
    shot: str = "{}"
    worked: str = ""
    stop: tuple[str, ...] = ()
    entry_point: str = ""


def read(path: str | Path, task: Task, ask: Callable[[str], str] | None = None) -> list[Problem]:
    """Read the problems of a JSONL file. Raises ValueError, naming the line and the key.

    ask: returns the prompt of a question, by default with the task's instruction behind it.
    """
    rows = ((f"{path}, line {number}", row) for number, row in read_lines(path, dict))
    return problems_of(rows, str(path), task, ask)


def problems_of(
    rows: Iterable[tuple[str, dict]],
    source: str,
    task: Task,
    ask: Callable[[str], str] | None = None,
) -> list[Problem]:
    """Problems of rows with their names in errors; source: the name of all rows. As `read`."""
    problems: list[Problem] = []
    for name, row in rows:
        with naming(name):
            problems.append(_problem(row, len(problems), task, ask))
    if not problems:
        raise ValueError(f"{source} has no problems")
    return problems


def _problem(row: dict, index: int, task: Task, ask: Callable[[str], str] | None = None) -> Problem:
    for key in filter(None, (task.question, task.answer, task.entry_point)):
        if key not in row:
            raise ValueError(f"has no {key!r}")
    prompt, answer = row[task.question], row[task.answer]
    check_prompt(prompt, task.question)
    if task.entry_point:
        name = row[task.entry_point]
        for key in (task.question, task.answer):
            if not fits(row[key], str):
                raise ValueError(f"must have a string as {key!r}, got {shown(row[key])}")
        if not isinstance(name, str) or not name.isidentifier() or iskeyword(name):
            raise ValueError(f"must have a name as {task.entry_point!r}, got {shown(name)}")
        return Problem(index, prompt, PASSED, prompt, Suite(answer, name))
    if not fits(answer, str | int | float):
        raise ValueError(f"must have a string or a number as {task.answer!r}, got {shown(answer)}")
    question = prompt if isinstance(prompt, str) else text_of(prompt[-1])
    if isinstance(prompt, str):
        prompt = prompt + task.ask if ask is None else ask(prompt)
    return Problem(index, prompt, task.gold(str(answer)), question)


def _gsm8k_gold(answer: str) -> str:
    gold = answer.rpartition("####")[2].strip()
    if number_of(gold) is None:
        raise ValueError(
            f"must have an 'answer' that ends in #### and a number, got {answer[-40:]!r}"
        )
    return gold


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
        answer_of,
        # formats and stop strings of lm-evaluation-harness's tasks gsm8k, minerva_math, humaneval
        shot="Question: {}\nAnswer:",
        worked="answer",
        stop=("Question:", "</s>", "<|im_end|>"),
    ),
    "math": Task(
        "problem",
        "answer",
        "\n\nReason step by step, and put the final answer within \\boxed{}.",
        str.strip,
        answer_of,
        shot="Problem:\n{}\n\nSolution:",
        worked="solution",
        stop=("Problem:",),
    ),
    "humaneval": Task(
        "prompt",
        "test",
        "",
        str,
        answer_of,
        stop=("\nclass", "\ndef", "\n#", "\nif", "\nprint"),
        entry_point="entry_point",
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
    "jsonl": Task("prompt", "answer", "", str.strip, answer_of),
}
