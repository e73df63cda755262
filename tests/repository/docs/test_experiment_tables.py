"""Tables of docs/experiments are those that `python -m tools.experiment_tables` makes."""

import re

import pytest

from tools.experiment_tables import MARKED, PAGES, TABLES, filled

# tables of studies that have left the repository
FINISHED = re.compile(r"<!-- finished table -->\n.*?<!-- /table -->", re.DOTALL)
# first cells of the tables that no result file holds: settings, compiled code, simulated budgets,
# and what was tried by hand
BY_HAND = {
    "commit",
    "side",
    "seconds for 8 answers",
    "kernel",
    "drafts",
    "constant",
    "change",
    "change or comparison",
    "tried",
    "prototype",
}


@pytest.mark.parametrize("path", sorted(PAGES.glob("*.md")), ids=lambda path: path.name)
def test_a_page_shows_its_result_files(path):
    page = path.read_text()
    assert filled(page) == page
    unmarked = FINISHED.sub("", MARKED.sub("", page))
    heads = re.findall(r"^\| (.*?) \|.*\n\| ?-", unmarked, re.MULTILINE)
    assert BY_HAND.issuperset(heads)


def test_every_table_is_shown_once():
    shown = [name for path in PAGES.glob("*.md") for name, _ in MARKED.findall(path.read_text())]
    assert sorted(shown) == sorted(TABLES)


def test_another_figure_is_found():
    page = (PAGES / "cpu.md").read_text()
    assert filled(page.replace("| 9.8 |", "| 9.7 |", 1)) == page
