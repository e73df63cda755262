"""Names within csd: a class has one of its own, a private name stays in its file, a function
has few parameters, and a backend is known by its properties."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import csd

ROOT = Path(csd.__file__).parent
MOST = 16
# a function of named options
MORE = {"train_head"}


@cache
def all_nodes():
    """(file, node) of every node of csd's sources."""
    return [
        (path.relative_to(ROOT).as_posix(), node)
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def nodes(kind):
    return ((path, node) for path, node in all_nodes() if isinstance(node, kind))


def test_classes_have_names_of_their_own():
    names = Counter(node.name for _, node in nodes(ast.ClassDef))
    assert len(names) > 500
    assert {name for name, count in names.items() if count > 1} == {"Properties"}


def test_private_names_are_not_imported():
    private = {
        (path, alias.name)
        for path, node in nodes(ast.ImportFrom)
        for alias in node.names
        if (node.module or "").startswith("csd") and alias.name.startswith("_")
        # of Python
        if not alias.name.startswith("__")
    }
    assert not private


def test_functions_have_few_parameters():
    """Kernels and loops take records, views and tuples."""
    parameters = Counter()
    for _, node in nodes(ast.FunctionDef | ast.AsyncFunctionDef):
        given = node.args
        count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
        parameters[node.name] = max(parameters[node.name], count)
    assert len(parameters) > 2000
    assert {name for name, count in parameters.items() if count > MOST} == MORE


def test_code_asks_for_a_backends_properties():
    """`Ops` declares them; only the file that chooses a backend compares names."""
    comparison = re.compile(r"""[\w.]*(?:ops|own)\.name (?:==|!=) "(?:reference|cpu|triton)\"""")
    files = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if comparison.search(path.read_text())
    }
    assert files == {"kernels/backends.py"}
