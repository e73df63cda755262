"""Files, links, headings and objects that the documentation names exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from bench.__main__ import commands

known_commands = cache(commands)
ROOT = Path(__file__).parents[3]
PAGES = [ROOT / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))


def page_of(path):
    return path.relative_to(ROOT).as_posix()


pages = pytest.mark.parametrize("page", PAGES, ids=page_of)


def anchors(path):
    """The fragments of a page's headings, as code hosts and mkdocs make them."""
    found = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).strip().replace(" ", "-") for h in found}


@pages
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!\w+:)([^)\s]+)", page.read_text()):
        name, _, fragment = target.partition("#")
        path = page.parent / name if name else page
        assert path.is_file(), target
        assert not fragment or fragment in anchors(path), target


@pages
def test_files_in_code_exist(page):
    places = r"`((?:csd|bench|tests|tools|examples|docs)/[\w/.]*)`"
    for name in re.findall(places, page.read_text()):
        assert (ROOT / name).exists(), name


@pages
def test_commands_run_modules_that_exist(page):
    text = page.read_text()
    for name in re.findall(r"python -m ((?:csd|bench)[\w.]*)", text):
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), name
    for name in re.findall(r"python -m\s+bench +(\w+)", text):
        assert name in known_commands() or name == "NAME", name


@pages
def test_headings_are_unique(page):
    """A merge once left whole sections twice."""
    headings = [line for line in page.read_text().splitlines() if line.startswith("## ")]
    assert len(headings) == len(set(headings))


def names_in(path):
    """The names that a module defines or imports, those for type checkers included."""
    found = set()
    body = ast.parse(path.read_text()).body
    for node in [*body, *(n for branch in body if isinstance(branch, ast.If) for n in branch.body)]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def file_of(module):
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@pages
def test_api_pages_name_existing_objects(page):
    """`::: csd.module.name`, and the `members` of a module. mkdocs itself is not needed."""
    lines = page.read_text().splitlines()
    for i, line in enumerate(lines):
        if not line.startswith("::: "):
            continue
        path = line.removeprefix("::: ")
        module, _, name = path.rpartition(".")
        if file_of(path).is_file():
            listed = re.search(r"members: \[(.*)\]", "\n".join(lines[i : i + 3]))
            for member in listed[1].split(", ") if listed else ():
                assert member in names_in(file_of(path)), (path, member)
        else:
            assert name in names_in(file_of(module)), path


def test_the_comparison_names_the_prior_work_on_drafter_invariance():
    page = (ROOT / "docs" / "comparison.md").read_text()
    assert "arxiv.org/abs/2408.07978" in page and "arxiv.org/abs/2506.05632" in page
    assert "which the others use" not in page
    assert "deprecated" in (ROOT / "docs" / "vllm.md").read_text()
