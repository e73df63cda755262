"""Cases that `make test` leaves to `make test-slow`, and what CI runs."""

import re
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import targets

ROOT = Path(__file__).parents[2]


def combined(rows, strength):
    return {each for row in rows for each in combinations(enumerate(row), strength)}


@pytest.mark.parametrize("strength", [1, 2])
@pytest.mark.parametrize("sizes", [(7,), (2, 3), (5, 2, 2, 3), (2, 2, 2, 2, 2, 2)], ids=str)
def test_each_combination_occurs_in_what_is_kept(sizes, strength):
    # some are no cases
    rows = [row for row in product(*map(range, sizes)) if sum(row) != 1]
    kept = targets.covering(rows, strength)
    most = min(strength, len(sizes))
    assert combined([rows[i] for i in kept], most) == combined(rows, most)
    assert len({*kept}) == len(kept) and kept == targets.covering(rows, strength)
    if len(sizes) > 3:
        assert len(kept) < len(rows) / 2


def test_names_of_one_parameter_are_one():
    # an argument that goes with the first, and one of a single value
    rows = [(a, a, b, 0) for a, b in product(range(4), range(5))]
    assert len(targets.covering(rows, 1)) == 5
    assert len(targets.covering(rows, 2)) == 20


class Case:
    """Stands for a collected case of one test."""

    path, originalname = Path("test_x.py"), "test_x"

    def __init__(self, a, b, mark):
        self.name, self.marks = f"test_x[{a}-{b}]", [mark]
        self.callspec = SimpleNamespace(params={"a": a, "b": b})

    def get_closest_marker(self, name):
        return next((each.mark for each in self.marks if each.mark.name == name), None)

    def add_marker(self, mark):
        self.marks.append(mark)


@pytest.mark.parametrize(
    ("mark", "kept"), [(targets.few(2), 2), (targets.values, 4), (targets.pairs, 12)], ids=str
)
def test_cases_that_are_left_out_are_marked_slow(mark, kept):
    cases = [Case(a, b, mark) for a, b in product(range(4), range(3))]
    targets.mark_left_out(cases)
    assert sum(case.get_closest_marker("slow") is None for case in cases) == kept


def test_few_cases_have_different_values():
    cases = [Case(a, b, targets.few(4)) for a, b in product(range(4), range(3))]
    targets.mark_left_out(cases)
    kept = [case for case in cases if case.get_closest_marker("slow") is None]
    for name, count in (("a", 4), ("b", 3)):
        assert len({case.callspec.params[name] for case in kept}) == count


def test_a_skipped_case_covers_nothing():
    cases = [Case(a, 0, targets.values) for a in (0, 0, 1)]
    for case in cases[:2]:
        case.add_marker(pytest.mark.skip)
        case.callspec.params["b"] = 7
    targets.mark_left_out(cases)
    assert not cases[2].get_closest_marker("slow")


def test_ci_runs_each_target_once_and_the_documentation():
    lines = re.findall(r"^make (\S+)", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert len({*lines}) == len(lines) and {"lint", "docs", "test", "test-slow"} <= {*lines}
    # marked quick are cases of `make test`
    assert "test-quick" not in lines
    known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {*lines} <= {*known}


def test_ci_keeps_the_folder_in_which_numba_puts_loops():
    page = (ROOT / ".github/workflows/ci.yml").read_text()
    kept = re.findall(r"^ +path: (.*)\n +key: loops-", page, re.MULTILINE)
    used = re.findall(r"^ +NUMBA_CACHE_DIR: \$\{\{ github.workspace \}\}/(.*)", page, re.MULTILINE)
    assert kept == used and len(kept) == 1
