"""The tables of docs/models.md are those that tools/family_table.py makes from the code."""

import re

import family_table
import pytest
import transformers
from helpers.models.families import MODULES, REFUSED
from helpers.targets import few

PAGE = family_table.PAGE.read_text()


def between(marks):
    return PAGE.split(marks[0])[1].split(marks[1])[0].strip()


ROWS = between(family_table.MARKS).splitlines()[2:]
NAMES = [*MODULES, *REFUSED]


def test_the_table_of_files_is_the_codes():
    assert between(family_table.FILES) == family_table.table_of_files()


def test_the_table_of_families_has_each_once():
    assert [re.match(r"\| (.*?) \|", row)[1] for row in ROWS[2:]] == NAMES


@few(6)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_the_codes(name):
    version = re.search(r"With transformers (\S+),", PAGE)[1]
    if transformers.__version__ != version:
        pytest.skip(f"the page was made with transformers {version}")
    made = "| " + " | ".join(family_table.row(name)) + " |"
    assert made in ROWS
