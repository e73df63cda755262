"""Every hint to install something names a package that is meant, and an extra that exists."""

import re
import shlex
import sys
import tomllib
import warnings
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import InvalidRequirement, Requirement

from csd.utils.lazy import (
    check_installed,
    packages_of,
    pip_install,
    source_of,
    warn_of_namesake,
)

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
WORD = r"""(?:'[^'\n]+'|[^\s'"`\\;&|(){}]+)"""


def hints(text):
    """The packages of each `pip install` in a text."""
    # a page may break the line behind -e
    command = rf"(?:pip install|\(PIP_INSTALL\))((?: +{WORD})*(?:(?<=-e)\s+{WORD})?)"
    for match in re.finditer(command, text.replace("{wanted}", "trl")):
        words = iter(match[1].replace("'", "").split())
        for word in words:
            if word in VALUED:
                next(words, None)
            elif not word.startswith("-"):
                yield word


FOUND = [(path, hint) for path in FILES for hint in hints(path.read_text())]


def test_hints_are_collected_from_code_and_pages():
    assert len(FOUND) > 30
    places = {str(path.relative_to(ROOT)) for path, _ in FOUND}
    assert {"README.md", "csd/serve/http/__init__.py", "docs/integrations.md"} <= places
    assert {"examples/grpo/grpo_lora.py", "csd/engine/options/logit_params.py"} <= places


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
        assert required.name not in ("csd", PROJECT["name"]), "no index has csd-llm"
        extras = set()
    assert extras <= set(EXTRAS)


def metadata_of(project):
    """The requirements as the metadata of an installation has them."""
    lines = [*project["dependencies"]]
    for extra, requirements in project["optional-dependencies"].items():
        lines += [f"{requirement}; extra == '{extra}'" for requirement in requirements]
    return lines


LINES = metadata_of(PROJECT)
PACKAGES = {Requirement(p).name: p for extra in EXTRAS for p in packages_of(extra, LINES)}


@pytest.mark.parametrize("folder", ["csd", "docs", "examples", "README.md"])
def test_a_hint_has_the_packages_that_the_code_prints(folder):
    """The words of a page name an extra's packages with the versions of pyproject.toml."""
    seen = 0
    for path, hint in FOUND:
        if not path.is_relative_to(ROOT / folder) or hint.startswith("."):
            continue
        if f"pip install -U {hint}" in path.read_text():
            continue
        required = Requirement(hint)
        meant = Requirement(PACKAGES.get(required.name, hint))
        # csd asks for "ray[data]", an example of Ray's server for "ray[serve]"
        if meant.extras == required.extras:
            seen += required.name in PACKAGES
            assert required == meant, (path, hint)
    assert seen


def test_the_packages_of_each_extra_are_printed(monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda name: LINES * (name == "csd-llm"))
    assert pip_install("trl", "lora") == "pip install 'trl>=1.16' 'peft>=0.18'"
    for extra, requirements in EXTRAS.items():
        words = shlex.split(pip_install(extra))
        assert words[:2] == ["pip", "install"] and len(set(words)) == len(words) > 2
        # extras that an extra names are replaced by their packages
        inner = [r for r in map(Requirement, requirements) if r.name == PROJECT["name"]]
        want = {r for r in requirements if Requirement(r).name != PROJECT["name"]}
        want |= {p for r in inner for part in r.extras for p in packages_of(part, LINES)}
        assert set(words[2:]) == want


@pytest.mark.parametrize("known", [None, ["numpy", "gguf; extra == 'gguf'"]], ids=str)
def test_sources_without_the_extra_in_the_metadata_have_a_hint_too(monkeypatch, known):
    def requires(name):
        if known is None:
            raise metadata.PackageNotFoundError(name)
        return known

    monkeypatch.setattr(metadata, "requires", requires)
    assert pip_install("trl") == "pip install -e '.[trl]' (in a clone of csd)"
    with pytest.raises(ImportError, match=r"csd.x needs nonesuch: pip install -e '.\[trl\]' .in a"):
        check_installed("nonesuch", "trl", "csd.x")


def test_an_extra_is_one_of_csd_llm():
    strange = re.compile(r"""(?<![\w.-])csd\[(?!["'\d])[^\]\s]*\]""")
    assert [path for path in FILES if strange.search(path.read_text())] == []


def test_extras_that_name_the_package_itself():
    for requirements in EXTRAS.values():
        for requirement in map(Requirement, requirements):
            assert requirement.name != "csd"
            if requirement.name == PROJECT["name"]:
                assert requirement.extras <= set(EXTRAS)


FROM = {
    None: "csd-llm",
    '{"url": "file:///a%20b/csd", "dir_info": {"editable": true}}': "-e '/a b/csd'",
    '{"url": "file:///srv/csd", "dir_info": {}}': "/srv/csd",
    '{"url": "https://h/csd.whl", "archive_info": {}}': "https://h/csd.whl",
    '{"url": "https://h/csd.git", "vcs_info": {"vcs": "git", "commit_id": "f00"}}': (
        "git+https://h/csd.git@f00"
    ),
}


@pytest.mark.parametrize("direct", FROM, ids=str)
def test_a_distribution_is_installed_again_from_where_it_came(tmp_path, direct):
    distribution(tmp_path, "csd_llm", "csd")
    (info,) = tmp_path.iterdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: csd-llm\nVersion: 1.0.0\n")
    if direct:
        (info / "direct_url.json").write_text(direct)
    assert source_of(metadata.PathDistribution(info)) == FROM[direct]


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
