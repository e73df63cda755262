"""Extraction of answers from texts."""

from pathlib import Path

import pytest

from csd.engine.options.thinking import TAG
from csd.evaluate.answers.equality import canonical
from csd.evaluate.answers.extract import (
    EXTRACTORS,
    answer_of,
    boxed,
    extractor,
    last_number,
    stated,
)

LINES = (Path(__file__).parent / "sentences.txt").read_text().splitlines()
SENTENCES = [line.split(" | ", 2) for line in LINES if not line.startswith("#")]


def has(text, how, value):
    """True if the answer of a text equals a value, or it has none and the value is "none"."""
    answer = EXTRACTORS[how](text.replace("¶", "\n"))
    return value == "none" if answer is None else canonical(answer) == canonical(value)


@pytest.mark.parametrize(("how", "value", "text"), SENTENCES)
def test_sentences_have_their_right_values(how, value, text):
    assert has(text, how, value)


@pytest.mark.parametrize("tag", ["think", "reasoning", "seed:think"])
def test_a_thought_changes_no_answer(tag):
    """A sentence as the thought of another, in and behind the prompt, and one that is not ended."""
    answers = [sentence for sentence in SENTENCES if not TAG.search(sentence[2])]
    assert len(answers) > 100
    for (how, value, text), (_, _, thought) in zip(answers, reversed(answers), strict=True):
        assert has(f"<{tag}>{thought}¶</{tag}>¶{text}", how, value)
        assert has(f"{thought}¶</{tag}>¶{text}", how, value)
        assert has(f"<{tag}>¶{text}", how, "none")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}} and done 7", r"\frac{1}{2}"),
        ("The answer is $1,234.50. That is 3 more.", "1234.5"),
        ("first 4, then -12.0", "-12"),
        ("no number at all", None),
        ("Final answer: **42**", "42"),
        (r"unfinished \boxed{3", "3"),
        (r"\boxed{5} and then \boxed{3", "5"),
        (r"within \boxed{} as asked: 7", "7"),
        (r"\boxed {1{,}234}", "1234"),
        ("The answer is 3/4.", "3/4"),
        (r"The answer is $\frac{3}{4}$ of the 8.", r"\frac{3}{4}"),
        ("The answer is 10 1/2 miles", "10 1/2"),
        ("The answer is 5 * 3 = 15 dollars.", "15"),
        ("The answer is (-3, 4).", "(-3, 4)"),
        ("The answer is -$5.", "-5"),
        (r"The answer is \(2\pi\). Or 3?", r"2\pi"),
        ("The answer is (B). Because 3 > 2.", "B"),
        ("The answer is 25%, or 1 in 4.", "25"),
        ("The answer is 12 eggs. The answer is\n\n13.", "13"),
        (r"\boxed{$1,000}", "1000"),
        ("The answer is that she pays for 5 of them.", "5"),
        ("The answer is (B).", "B"),
        ("", None),
    ],
)
def test_answers(text, answer):
    assert answer_of(text) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7 apples", "7"),
        ("he has 5-3", "3"),
        ("x = -3", "-3"),
        ("x = −3.50", "-3.5"),
        ("the sequence 1,2,3", "3"),
        ("12,345,678 people.", "12345678"),
        ("about .50 of it", "0.5"),
        ("agent 007", "7"),
        ("-0.0", "0"),
        ("100", "100"),
        ("12.", "12"),
        (r"10,\!000 or 9\,500", "9500"),
        (r"\$5 less: -\$3", "-3"),
        ("½ of it", "1/2"),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


def test_boxed_takes_the_last_and_balances_braces():
    assert boxed(r"\boxed{1} \boxed{a{b}c}") == "a{b}c"
    assert boxed("none") is None
    assert boxed(r"\boxed{\{1, 2\}} and \boxed{x") == r"\{1, 2\}"
    assert boxed(r"\boxed{\boxed{8}}") == "8"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 3. No, the answer is \\(4\\).", "4"),
        ("The answer is blue. Or 7?", "blue"),
        ("Answer: (C)\nBecause 3", "C"),
        ("The answer is", None),
        ("It is 9.", None),
        (r"The answer is $\boxed{42}$. I hope it is.", "42"),
    ],
)
def test_stated(text, answer):
    assert stated(text) == answer


def test_extractors_by_name():
    assert [extractor(name) for name in EXTRACTORS] == list(EXTRACTORS.values())
    for wrong in ("last", None, ["any"]):
        with pytest.raises(ValueError, match=r"extract must be a function or one of .*got "):
            extractor(wrong)
