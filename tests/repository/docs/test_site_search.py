"""The questions that the site's search must find, checked when `make docs` ends."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HOOK = ROOT / "docs" / "site_search.py"
QUESTIONS = next(
    ast.literal_eval(node.value)
    for node in ast.parse(HOOK.read_text()).body
    if isinstance(node, ast.Assign) and node.targets[0].id == "QUESTIONS"
)


def headings(page):
    text = (ROOT / "docs" / page).with_suffix(".md").read_text()
    return re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_heading_of_the_page_has_the_words(question):
    """Checks the search of the built site from the pages alone."""
    words = set(question.lower().split())
    found = headings(QUESTIONS[question].strip("/"))
    assert any(words <= set(re.findall(r"\w+", heading.lower())) for heading in found), found


def test_a_build_without_such_a_heading_fails(tmp_path):
    pytest.importorskip("mkdocs", reason="needs mkdocs: make install-docs")
    import json
    import runpy

    from mkdocs.exceptions import PluginError

    hook = runpy.run_path(str(HOOK))
    (tmp_path / "search").mkdir()
    index = tmp_path / "search" / "search_index.json"
    sections = [{"location": f"{p}#x", "title": q, "text": ""} for q, p in QUESTIONS.items()]
    index.write_text(json.dumps({"docs": sections}))
    hook["on_post_build"]({"site_dir": str(tmp_path)})
    index.write_text(json.dumps({"docs": sections[1:]}))
    with pytest.raises(PluginError, match="7B 16 GB: will_it_run/"):
        hook["on_post_build"]({"site_dir": str(tmp_path)})


def test_make_docs_runs_it():
    assert "docs/site_search.py" in (ROOT / "mkdocs.yml").read_text()


def test_readme_leads_to_licence_citation_and_maintenance():
    """From "For you", to a page that has them."""
    readme = (ROOT / "README.md").read_text()
    assert "docs/will_it_run.md" in re.search(r"\*\*For you.*?\n- ", readme, re.S)[0]
    page = (ROOT / "docs" / "will_it_run.md").read_text()
    assert all(f"../{name}" in page for name in ("LICENSE", "CITATION.cff", "CHANGELOG.md"))
