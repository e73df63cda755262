"""The command line and the demo's parts, on the real model."""

import json

import pytest

import csd
from csd.cli import main
from csd.models.demo import smollm2_path
from csd.result import Sample
from csd.vote import answer_of, boxed, last_number, vote


def test_sample_prints_one_json_object(capsys):
    code = main(
        ["sample", smollm2_path(), "What is 2 + 3?", "-n", "3", "--max-new-tokens", "12",
         "--temperature", "0.7", "--seed", "1", "--budget", "8", "--json"]
    )  # fmt: skip
    out = capsys.readouterr().out
    csd.release()
    assert code == 0
    assert len(out.splitlines()) == 1
    result = json.loads(out)
    assert len(result["texts"]) == len(result["tokens"]) == 3
    assert all(len(t) == len(p) for t, p in zip(result["tokens"], result["logprobs"], strict=True))
    assert set(result["finish_reasons"]) <= {"stop", "length"}
    assert result["seed"] == 1
    assert result["stats"]["tokens"] == sum(map(len, result["tokens"]))


def test_errors_are_one_line(capsys, tmp_path):
    assert main(["sample", str(tmp_path), "x"]) == 2
    assert "no config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}} and done 7", r"\frac{1}{2}"),
        ("The answer is $1,234.50. That is 3 more.", "1234.5"),
        ("first 4, then -12.0", "-12"),
        ("no number at all", None),
        ("Final answer: **42**", "42"),
        (r"unfinished \boxed{3", "3"),
    ],
)
def test_answers(text, answer):
    assert answer_of(text) == answer


def test_boxed_takes_the_last_and_balances_braces():
    assert boxed(r"\boxed{1} \boxed{a{b}c}") == "a{b}c"
    assert last_number("7 apples") == "7"


def sample(index, text, reason="stop"):
    return Sample(index, text, [], [], [], reason)


def test_vote_is_a_majority_with_ties_to_the_lowest_index():
    out = [sample(0, "5"), sample(1, "3"), sample(2, "3"), sample(3, "5"), sample(4, "?")]
    decided = vote(out)
    assert (decided.answer, decided.count, decided.total) == ("5", 2, 4)
    assert decided.answers == ["5", "3", "3", "5", None]
    assert vote(out, weight=lambda s: 1 + s.index).answer == "5"
    assert vote([sample(0, "9", "cancelled"), sample(1, "3")]).answer == "3"
    assert vote([sample(0, "none")]).answer is None
