"""Templates of issues and pull requests, and the changelog's headings."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from csd.cli.main import make_parser
from csd.utils.version import __version__

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PULL = (ROOT / ".github" / "pull_request_template.md").read_text()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_has_what_a_code_host_asks_for(path):
    form = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert form == {"blank_issues_enabled": True}
        return
    assert form["name"] and form["description"] and form["labels"]
    ids = [part["id"] for part in form["body"]]
    assert len(ids) == len(set(ids)) and ids
    for part in form["body"]:
        assert part["type"] == "textarea" and part["attributes"]["label"]
    commands = make_parser()[1].choices
    for name in re.findall(r"\bcsd (\w+)", path.read_text()):
        assert name in commands, name
    for name in re.findall(r"\b(?:examples|docs)/[\w./]+\w", path.read_text()):
        assert (ROOT / name).is_file(), name


def test_files_and_targets_of_a_pull_request_exist():
    (target,) = re.findall(r"\]\(\.\./([\w./]+)#", PULL)
    assert (ROOT / target).is_file()
    makefile = (ROOT / "Makefile").read_text()
    for name in re.findall(r"`make (\w+)`", PULL):
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), name


def test_the_changelog_has_sections_of_versions():
    """The newest version is the package's; older ones have a date and, in a clone, a tag."""
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert re.fullmatch(rf"{re.escape(__version__)}, (unreleased|\d{{4}}-\d\d-\d\d)", versions[0])
    tags = subprocess.run(["git", "tag"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    for version in versions[1:]:
        number, date = version.split(", ")
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
        assert f"v{number}" in tags or not tags
    for version in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        for level, known in ((3, {"Added", "Changed", "Fixed", "Removed"}), (4, None)):
            found = re.findall(rf"^{'#' * level} (.*)$", version, re.MULTILINE)
            assert len(found) == len(set(found)) and (known is None or known >= set(found))


def test_links_of_the_changelog_lead_somewhere():
    for target in re.findall(r"\]\((?!\w+:)([^)#\s]+)", (ROOT / "CHANGELOG.md").read_text()):
        assert (ROOT / target).is_file(), target
