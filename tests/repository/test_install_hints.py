"""Every hint to install something names a package that is meant, and an extra that exists."""

import re
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
from packaging.requirements import InvalidRequirement, Requirement

from csd.utils.lazy import warn_of_namesake

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
FOLDERS = ("csd", "docs", "examples", "bench", ".github")
FILES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".md", ".ipynb", ".yaml", ".yml", ".html"}
    and "results" not in path.parts
]
FILES += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml")]
# options of pip with a value that is no package
VALUED = {"-c", "--index-url", "--target"}
WORD = r"""(?:'[^'\n]+'|[^\s'"`\\;&|(){}]+(?:\{extra\})?)"""


def hints(text):
    """The packages of each `pip install` in a text."""
    # a page may break the line behind -e
    command = rf"(?:pip install|\(PIP_INSTALL\))((?: +{WORD})*(?:(?<=-e)\s+{WORD})?)"
    for match in re.finditer(command, text.replace("{extra}", "trl")):
        words = iter(match[1].replace("'", "").split())
        for word in words:
            if word in VALUED:
                next(words, None)
            elif not word.startswith("-"):
                yield word


FOUND = [(path, hint) for path in FILES for hint in hints(path.read_text())]


def test_hints_are_collected_from_code_and_pages():
    """With the line of a missing extra, which the code completes."""
    assert len(FOUND) > 30
    own = {str(path.relative_to(ROOT)) for path, hint in FOUND if hint.startswith("csd-llm[")}
    assert {"csd/utils/lazy.py", "csd/models/load/gguf/__init__.py", "docs/integrations.md"} <= own


@pytest.mark.parametrize(
    ("path", "hint"), FOUND, ids=[f"{path.name}-{hint}" for path, hint in FOUND]
)
def test_a_hint_names_no_stranger(path, hint):
    match = re.fullmatch(r"\.(?:\[(.*)\])?", hint)
    if match:
        extras = set(match[1].split(",")) if match[1] else set()
    else:
        try:
            required = Requirement(hint)
        except InvalidRequirement:
            # prose behind the command: "pip install it"
            pytest.fail(f"{path} has an install hint that is no requirement: {hint}")
        # PyPI's csd is subgroup discovery
        assert required.name != "csd"
        extras = required.extras if required.name == PROJECT["name"] else set()
    assert extras <= set(EXTRAS)


def test_an_extra_is_one_of_csd_llm():
    strange = re.compile(r"""(?<![\w.-])csd\[(?!["'\d])[^\]\s]*\]""")
    assert [path for path in FILES if strange.search(path.read_text())] == []


def test_extras_that_name_the_package_itself():
    for requirements in EXTRAS.values():
        for requirement in map(Requirement, requirements):
            assert requirement.name != "csd"
            if requirement.name == PROJECT["name"]:
                assert requirement.extras <= set(EXTRAS)


def distribution(folder, name, summary, command=None):
    """Metadata of an installed distribution, as pip leaves them."""
    info = folder / f"{name}-1.0.0.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0.0", f"Summary: {summary}"]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    if command:
        (info / "entry_points.txt").write_text(f"[console_scripts]\ncsd = {command}\n")


@pytest.mark.parametrize(
    ("name", "command", "strange"),
    [
        ("csd", None, True),
        # what an installation of this package before its distribution had a name of its own left
        ("csd", "csd.cli.main:main", False),
        ("csd_llm", "csd.cli.main:main", False),
    ],
)
def test_a_distribution_of_the_same_name_is_noticed(tmp_path, monkeypatch, name, command, strange):
    distribution(tmp_path, name, "subgroup discovery", command)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_namesake.__wrapped__()
    assert [str(w.message).split(":")[0] for w in caught] == strange * [
        "the distribution csd 1.0.0 (subgroup discovery) is another project, and its files replace "
        "some of csd-llm's"
    ]
