"""CONTRIBUTING's table of where to change what: files, names in them and tests exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
ROWS = re.findall(r"^\| (.*) \| (.*) \| `(tests/[\w/.]+)` \|$", TEXT, re.MULTILINE)


def names_of(path):
    """Functions, classes, methods and constants that a file defines."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (x.name for x in node.body if isinstance(x, ast.FunctionDef))
            found |= {f"{node.name}.{name}" for name in methods}
        if isinstance(node, ast.Assign):
            found |= {
                x.id for target in node.targets for x in ast.walk(target) if isinstance(x, ast.Name)
            }
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def test_every_row_of_the_table_is_read():
    section = TEXT.split("## Where to change what")[1].split("\n## ")[0]
    assert len(ROWS) == section.count("\n| ") - 1 > 15


@pytest.mark.parametrize(("change", "edit", "run"), ROWS, ids=[row[0] for row in ROWS])
def test_the_table_names_what_there_is(change, edit, run):
    assert (ROOT / run).is_file()
    path = None
    for name in re.findall(r"`([^`]+)`", edit):
        if name.endswith(".py"):
            path = ROOT / name if "/" in name else path.parent / name
            assert path.is_file(), name
        else:
            assert name in names_of(path), (name, path)


def test_an_option_is_the_files_of_its_section():
    """No other file of csd has a name with that of the option that the section adds."""
    section = TEXT.split("## Adding an option")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(csd/[\w/.]+)`: ((?:`\w+`(?:, )?)+) \| .* \|$", section, re.MULTILINE)
    for path, names in rows:
        assert {*re.findall(r"\w+", names)} <= names_of(ROOT / path), path
    sources = (ROOT / "csd").rglob("*.py")
    has = [p for p in sources if re.search(r"typical_|_typical", p.read_text())]
    assert sorted(p.relative_to(ROOT).as_posix() for p in has) == sorted(path for path, _ in rows)
    assert len(rows) == 5
    for path in re.findall(r"`((?:csd|tests|docs)/[\w/.]+\.\w+)`", section):
        assert (ROOT / path).is_file(), path
