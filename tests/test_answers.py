"""What is taken for the answer of a text."""

import pytest

from csd.answers import EXTRACTORS, answer_of, boxed, extractor, last_number, stated


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}} and done 7", r"\frac{1}{2}"),
        ("The answer is $1,234.50. That is 3 more.", "1234.5"),
        ("first 4, then -12.0", "-12"),
        ("no number at all", None),
        ("Final answer: **42**", "42"),
        (r"unfinished \boxed{3", "3"),
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
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


def test_boxed_takes_the_last_and_balances_braces():
    assert boxed(r"\boxed{1} \boxed{a{b}c}") == "a{b}c"
    assert boxed("none") is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 3. No, the answer is \\(4\\).", "4"),
        ("The answer is blue. Or 7?", "blue"),
        ("Answer: (C)\nBecause 3", "C"),
        ("The answer is", None),
        ("It is 9.", None),
    ],
)
def test_stated(text, answer):
    assert stated(text) == answer


def test_extractors_by_name():
    assert [extractor(name) for name in EXTRACTORS] == list(EXTRACTORS.values())
    with pytest.raises(ValueError, match=r"extract must be a function or one of .*got 'last'"):
        extractor("last")
