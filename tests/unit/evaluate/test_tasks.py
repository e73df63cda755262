"""Files of problems, and when two answers are the same."""

import json

import pytest

from csd.evaluate.answers.equality import canonical
from csd.evaluate.problems.tasks import TASKS, read


@pytest.mark.parametrize(
    "same",
    [
        ["1/2", "0.5", ".50", r"\frac{1}{2}", r"\dfrac{1}{2}", r"\frac12", r"$\tfrac 1 2$", "2/4"],
        ["-3", "−3", "-3.0", r"-\frac{6}{2}", r"\frac{-3}{1}"],
        ["10000", "10,000", r"10,\!000", r"\$10,000"],
        ["90", r"90^\circ", r"90^{\circ}", "90.", r"90\%"],
        [r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"],
        [r"\text{Evelyn}", "Evelyn"],
        ["x=5", "5", "x = 5"],
        [r"2\sqrt3", r"2\sqrt{3}"],
        ["1,2,3", "1, 2, 3"],
        ["10 1/2", "10.5", r"10\frac{1}{2}", r"\frac{21}2"],
        ["12", r"12\text{ cm}", r"12 \mathrm{cm}", "12 cm", "12 cm^2", "12.0 square"],
        ["1500", "1.5e3", r"1.5 \times 10^3", r"1.5\cdot 10^{3}", "15E+2", "1 500"],
        ["-0.02", "-2e-2", r"-2 \times 10^{-2}"],
        ["1234", "1{,}234", "1,234", r"1\,234"],
        ["B", "(B)", r"\text{(B)}", "(b)", "B: Paris", "B. 12", "(B) 12 m", r"\textbf{B}", "**B**"],
        ["100000", "1,00,000", "100 000", "100.000,0", "100'000", "1 lakh"],
        ["5/2", "2½", "2 1/2", r"2\frac12", "2.5"],
        ["460", r"\text{460}", r"\text{460 dollars}", r"460 \text{ dollars}"],
        ["-5", "-$5", r"-\$5.00"],
    ],
)
def test_spellings_of_one_answer(same):
    assert len({canonical(s) for s in same}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1,2", "12"),
        ("1/2", "1/3"),
        ("x+1", "x+2"),
        ("-5", "5"),
        ("1/0", "0"),
        ("(1,2)", "[1,2]"),
        ("10 1/2", "101/2"),
        (".5", "5"),
        ("3 4", "34.0"),
        ("2 pi", "2"),
        ("3 x", "3"),
        ("1.5 e", "1.5"),
        ("3 1000", "31000"),
        ("2 or 3", "2"),
        ("1,00,00", "10000"),
        ("3 million", "3"),
        ("A and B", "A"),
        ("C - 1", "C"),
    ],
)
def test_different_answers(one, other):
    assert canonical(one) != canonical(other)


@pytest.mark.parametrize(
    ("answer", "want"),
    [
        ("78.73", "78.73"),
        ("-0.05", "-0.05"),
        (r"\frac{1}{8}", "0.125"),
        ("1/3", "1/3"),
        ("2/6", "1/3"),
        ("-22/7", "-22/7"),
        ("4/2", "2"),
        ("1000.50", "1000.5"),
    ],
)
def test_numbers_are_decimals_where_these_are_finite(answer, want):
    assert canonical(answer) == want
    assert canonical(want) == want


def test_tasks_read_their_files(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"question": "How many?", "answer": "2+3=<<2+3=5>>5\n#### 1,005"}))
    (problem,) = read(path, TASKS["gsm8k"])
    assert problem.answer == "1,005"
    assert problem.prompt.startswith("How many?\n")
    assert TASKS["gsm8k"].extract("so 3. The answer is $1,005.00 and not 7.") == "1005"

    path.write_text(
        json.dumps({"problem": "Find it.", "answer": r"\frac{1}{2}", "level": 3}) + "\n"
    )
    (problem,) = read(path, TASKS["math"])
    assert problem.answer == r"\frac{1}{2}"
    assert TASKS["math"].extract(r"Thus \boxed{\dfrac12}.") == r"\dfrac12"

    question = "Which is the capital?\nA. Rome\nB. Pisa"
    path.write_text(json.dumps({"question": question, "answer": "a"}))
    (problem,) = read(path, TASKS["letter"])
    assert problem.answer == "A" and problem.prompt.startswith(question)
    assert TASKS["letter"].extract("B is not. The answer is (A), Rome.") == "A"

    messages = [{"role": "user", "content": "7?"}]
    rows = [{"prompt": "6?", "answer": 6}, {"prompt": messages, "answer": "7"}]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    plain, chat = read(path, TASKS["jsonl"])
    assert (plain.prompt, plain.answer) == ("6?", "6")
    assert (chat.prompt, chat.index) == (messages, 1)


def test_errors_name_the_line(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n')
    with pytest.raises(ValueError, match="line 2 has no 'answer'"):
        read(path, TASKS["jsonl"])
    path.write_text('{"prompt": "a"\n')
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        read(path, TASKS["jsonl"])
    for row, message in [
        ('{"prompt": 5, "answer": 5}', "line 1 must have a string or messages as 'prompt', got 5"),
        ('{"prompt": " ", "answer": 5}', "must have a string or messages"),
        ('{"prompt": [1, 2], "answer": 5}', "must have a string or messages"),
        ('{"prompt": "a", "answer": null}', "string or a number as 'answer', got None"),
        ("[1]", r"line 1 must be an object, got \[1\]"),
    ]:
        path.write_text(row)
        with pytest.raises(ValueError, match=message):
            read(path, TASKS["jsonl"])
    path.write_text('{"question": "a", "answer": "so it is five"}')
    with pytest.raises(
        ValueError, match="line 1 must have an 'answer' that ends in #### and a number"
    ):
        read(path, TASKS["gsm8k"])
    path.write_text('{"question": "a", "answer": "Rome"}')
    with pytest.raises(
        ValueError, match=r"letter of an option, A to J, as 'answer', got 'Rome'.*--task jsonl"
    ):
        read(path, TASKS["letter"])
    # what the error advises
    path.write_text('{"prompt": "a", "answer": "Rome"}')
    assert read(path, TASKS["jsonl"])[0].answer == "Rome"
    # programs are called by a name that Python can call, and tested by source
    program = {"prompt": "def one():", "test": "def check(f): pass", "entry_point": "one"}
    for wrong, message in [
        *((dict(entry_point=name), "a name as 'entry_point'") for name in ("class", "None", "a b")),
        *((dict(entry_point=name), "a name as 'entry_point'") for name in (None, 5, "")),
        *((dict(test=value), "a string as 'test', got") for value in (5, 0.5, None, ["a"], True)),
        (dict(prompt=[{"role": "user", "content": "a"}]), "a string as 'prompt'"),
    ]:
        path.write_text(json.dumps(program | wrong))
        with pytest.raises(ValueError, match=f"line 1 must have {message}"):
            read(path, TASKS["humaneval"])
    path.write_text("\n")
    with pytest.raises(ValueError, match="has no problems"):
        read(path, TASKS["jsonl"])
