"""A docstring begins with a verb or a noun, not with a clause that stands in its place."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = "csd", "tests", "tools", "bench", "examples"
CLAUSES = {
    "And",
    "As",
    "By",
    "How",
    "Of",
    "That",
    "Those",
    "What",
    "Whatever",
    "When",
    "Where",
    "Whether",
    "Which",
    "Who",
    "Why",
}
# a text that does; most files have none
BEGUN = re.compile(rf"""["']\s*(?:{"|".join(sorted(CLAUSES))})\b""")
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


def inverted(source: str) -> list[tuple[int, str]]:
    """Lines and first lines of docstrings that begin with a word of CLAUSES."""
    if not BEGUN.search(source):
        return []
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    texts = [(node.body[0].lineno, text) for node in nodes if (text := ast.get_docstring(node))]
    return [(line, text.split("\n")[0]) for line, text in texts if text.split()[0] in CLAUSES]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_verb_or_a_noun(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    found = [(str(f.relative_to(ROOT)), *x) for f in files for x in inverted(f.read_text())]
    assert files and not found


def test_clauses_are_found():
    source = '"""What it is."""\ndef f():\n    """Whether it is.\n\n    More.\n    """\n'
    assert inverted(source) == [(1, "What it is."), (3, "Whether it is.")]
    assert not inverted('"""Whatsoever.\n\nOf it.\n"""\nclass A:\n    pass\n')
