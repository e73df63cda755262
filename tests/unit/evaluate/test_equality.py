"""Equal answers: a table of answers with the right value, and expressions at random."""

import random
import subprocess
import sys
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest
from helpers.targets import few, slow
from hypothesis import given, settings
from hypothesis import strategies as st

import csd
from csd.cli.main import Printed, _show
from csd.engine.results.result import Sample
from csd.engine.results.stats import Stats
from csd.evaluate.answers.equality import canonical
from csd.evaluate.answers.extract import answer_of
from csd.evaluate.evaluation import run
from csd.evaluate.problems.tasks import TASKS, Problem
from csd.evaluate.vote import vote

LINES = (Path(__file__).parent / "equal_answers.txt").read_text().splitlines()
TABLE = [line for line in LINES if not line.startswith("# ")]


def rows(sign):
    return [line.split(f" {sign} ") for line in TABLE if f" {sign} " in line]


EQUAL, DIFFERENT, TEXTS = rows("=="), rows("!="), rows("->")


def test_each_line_of_the_table_is_a_case():
    assert len(EQUAL) + len(DIFFERENT) + len(TEXTS) == len(TABLE) > 200


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_answers(one, other):
    assert canonical(one) == canonical(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_answers(one, other):
    assert canonical(one) != canonical(other)


@pytest.mark.parametrize(("text", "value"), TEXTS)
def test_answers_of_texts(text, value):
    answer = answer_of(text.replace("¶", "\n"))
    assert value == "none" if answer is None else canonical(answer) == canonical(value)


def test_a_box_around_an_answer_and_a_sentence_change_nothing():
    for answer in {side for pair in EQUAL + DIFFERENT for side in pair}:
        found = answer_of(rf"The parts are 7 and 9. So \boxed{{{answer}}}.")
        assert found is not None and canonical(found) == canonical(answer), answer


def test_all_spellings_of_an_answer_vote_together_in_any_order():
    classes = {}
    for pair in EQUAL:
        for spelling in pair:
            classes.setdefault(canonical(spelling), set()).add(spelling)
    spellings = sorted(max(classes.values(), key=len)) * 2 + ["17", "yes", "Yes", r"x+y", r"y + x"]
    counts = set()
    for seed in range(5):
        order = random.Random(seed).sample(spellings, len(spellings))
        out = [Sample(i, rf"\boxed{{{text}}}", [], [], [], "stop") for i, text in enumerate(order)]
        decided = vote(out)
        assert len({*decided.answers}) == 4
        assert csd.Vote().of(len(out))(out) is True
        counts.add((canonical(decided.answer), decided.count, decided.second))
    assert len(counts) == 1


class Expression:
    """A random expression as two spellings, and its value at a point."""

    def __init__(self, draw, depth):
        kind = draw(st.sampled_from("nxy" if depth == 0 else "nxy+-*/^r"))
        self.atom = kind in "nxy^r"
        if kind == "n":
            number = draw(st.integers(1, 12))
            self.texts, self.of = [str(number), f"{number}.0"], lambda x, y: Fraction(number)
        elif kind in "xy":
            self.texts, self.of = [kind, f"{{{kind}}}"], lambda x, y: x if kind == "x" else y
        elif kind == "^":
            base, power = Expression(draw, depth - 1), draw(st.integers(2, 3))
            product = r"\cdot".join([rf"\left({base.texts[1]}\right)"] * power)
            self.texts = [f"({base.texts[0]})^{power}", f"({product})"]
            self.of = lambda x, y: base.of(x, y) ** power
        elif kind == "r":
            inner = Expression(draw, depth - 1)
            self.texts = [f"({inner.texts[0]})^2", rf"\sqrt{{({inner.texts[1]})^{{4}}}}"]
            self.of = lambda x, y: inner.of(x, y) ** 2
        else:
            a, b = (Expression(draw, depth - 1) for _ in range(2))
            (p, q), (r, s) = ([self._inside(e, text) for text in e.texts] for e in (a, b))
            self.texts = {
                "+": [f"{p}+{r}", f"{s} + {q}"],
                "-": [f"{p}-{r}", f"-{s}+{q}"],
                "*": [rf"{p}\cdot {r}", rf"{s} \times {q}"],
                "/": [f"{p}/{r}", rf"\frac{{{q}}}{{{s}}}"],
            }[kind]
            self.of = {
                "+": lambda x, y: a.of(x, y) + b.of(x, y),
                "-": lambda x, y: a.of(x, y) - b.of(x, y),
                "*": lambda x, y: a.of(x, y) * b.of(x, y),
                "/": lambda x, y: a.of(x, y) / b.of(x, y),
            }[kind]

    @staticmethod
    def _inside(expression, text):
        return text if expression.atom else f"({text})"

    def values(self):
        points = [(Fraction(7, 3), Fraction(5, 11)), (Fraction(-9, 4), Fraction(13, 7))]
        try:
            return [self.of(x, y) for x, y in points]
        except ZeroDivisionError:
            return None


def equal_where_values_are(data):
    one, other = Expression(data.draw, 2), Expression(data.draw, 2)
    # a letter alone may be an option
    if None in (one.values(), other.values()) or {"x", "y"} & {one.texts[0], other.texts[0]}:
        return
    assert canonical(one.texts[0]) == canonical(one.texts[1]), one.texts
    same = canonical(one.texts[0]) == canonical(other.texts[0])
    assert same == (one.values() == other.values()), (one.texts, other.texts)


@given(st.data())
@settings(max_examples=8, deadline=None)
def test_random_expressions_are_equal_where_their_values_are(data):
    equal_where_values_are(data)


@slow
@given(st.data())
@settings(max_examples=200, deadline=None)
def test_more_random_expressions_are_equal_where_their_values_are(data):
    equal_where_values_are(data)


@few(8)
@pytest.mark.parametrize(
    "answer",
    [
        "9^9^9^9",
        "9^{9^{9^9}}",
        "((9^{999})^{999})^{999}",
        r"\sqrt[9^{9^9}]{2}",
        "9^9!",
        "(9!)!",
        "99999!",
        r"\binom{10^9}{5\cdot 10^8}",
        "e^{e^{e^{e^{99}}}}",
        "x^{x^{x^{x^{x}}}}",
        r"\int_0^1 x^x dx",
        "(" * 300 + "1" + ")" * 300,
        "{" * 150 + "1" + "}" * 150,
        r"\frac{" * 40 + "1" + "}{2}" * 40,
        "+".join(f"(x+{i})^9" for i in range(40)),
        "|" * 200 + "x" + "|" * 200,
        "1," * 200,
        r"\pm" * 200,
    ],
)
def test_no_answer_takes_long(answer):
    canonical("x+1")
    start = time.process_time()
    assert canonical(answer) == canonical(f" {answer} ")
    # the slowest takes half a second with each spelling, where one that is evaluated takes minutes
    assert time.process_time() - start < 20


@pytest.mark.parametrize(("small", "large"), [("2^{200}", "2^{200}+1"), ("99!", "99!+1")])
def test_large_numbers_are_exact(small, large):
    assert canonical(small) != canonical(large)
    assert canonical(rf"{large}-1") == canonical(small)


THREADS = """
import threading
from csd.evaluate.answers.equality import canonical
texts = [f"(x+{i})^2" for i in range(6)]
found = [[] for _ in range(4)]
def read(place):
    found[place] = [canonical(text) for text in texts]
threads = [threading.Thread(target=read, args=[i]) for i in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert all(read == found[0] for read in found) and len({*found[0]}) == 6, found
assert found[0] == [canonical(f"x^2+{2 * i}x+{i * i}") for i in range(6)]
"""
LAZY = """
import sys, csd
from csd.engine.results.result import Sample
out = [Sample(i, text, [], [], [], "stop") for i, text in enumerate(["5", "yes", "(B)", "1, 2"])]
csd.vote(out)
assert not {"sympy", "latex2sympy2_extended", "antlr4"} & {*sys.modules}
"""


@slow
def test_the_first_expression_imports_the_library_in_any_thread():
    subprocess.run([sys.executable, "-c", LAZY + THREADS], check=True)


def drawn(*texts):
    made = [csd.Sample(i, text, [1], [-1.0], [-1.0], "stop") for i, text in enumerate(texts)]
    return csd.Samples(made, 0, [], Stats())


def test_without_the_parser_all_but_expressions_vote(monkeypatch, capsys):
    """`csd sample` prints its samples anyway; `csd eval` draws nothing that it cannot grade."""
    for name in ("latex2sympy2_extended", "antlr4"):
        # neither is found nor imported
        monkeypatch.setitem(sys.modules, name, None)
    # forgets what was read with the parser
    canonical.cache_clear()
    numbers = drawn("So 5.", r"\boxed{\frac{10}{2}}", "It is $5.00", r"\boxed{\text{yes}}")
    assert csd.vote(numbers).count == 3
    assert csd.vote(drawn("(B)", "B: Paris"), "letter").count == 2
    roots, problem = drawn(r"\boxed{x^2+1}"), Problem(0, "Factor it.", "x^2+1")
    needed = r"expressions, such as 'x\^2\+1', needs latex2sympy2_extended: pip install "
    with pytest.raises(ImportError, match=needed):
        csd.vote(roots)
    with pytest.raises(ImportError, match=needed):
        next(run(None, [problem], TASKS["math"], None, num_samples=1, chat=False, seed=0))
    for out in (numbers, roots):
        _show(out, None, Namespace(json=False), Printed(True), None)
    shown = capsys.readouterr().out
    assert "--- vote: 5 (3 of 4 votes" in shown
    assert "--- no vote: the comparison of answers that are expressions" in shown


def test_a_pool_reads_as_one_thread_does():
    answers = [side for pair in EQUAL for side in pair]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(canonical.__wrapped__, answers)]
    assert found == [canonical(answer) for answer in answers]
