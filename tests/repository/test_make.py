"""Targets of the Makefile: on machines with a GPU, which may have no network; the site's link."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="needs make: apt-get install make")

# notes its arguments, and has or lacks packages
STAND_IN = """#!/bin/sh
case "$1" in
    -c) exit {lacks} ;;
    *) echo "$0 $*" >> {log} ;;
esac
"""


@pytest.fixture
def ran(tmp_path):
    """ran(target, ..): what `make target` runs, with interpreters that have packages or not."""

    def run(target, of_machine, of_environment=None):
        log = tmp_path / "log"
        log.touch()
        for path, has in (("python", of_machine), (".venv/bin/python", of_environment)):
            if has is not None:
                (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / path).write_text(STAND_IN.format(lacks=int(not has), log=log))
                (tmp_path / path).chmod(0o755)
        done = subprocess.run(
            ["make", target, f"PYTHON={tmp_path / 'python'}", f"VENV={tmp_path / '.venv'}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={k: v for k, v in os.environ.items() if not k.startswith("MAKE")},
        )
        return done, log.read_text().replace(f"{tmp_path}/", "").splitlines()

    return run


@pytest.mark.parametrize("target", ["test-gpu", "bench-gpu"])
def test_nothing_is_installed_where_all_is_there(ran, target):
    module = {"test-gpu": "pytest", "bench-gpu": "bench.gpu"}[target]
    for has, python in (((True,), "python"), ((False, True), ".venv/bin/python")):
        done, lines = ran(target, *has)
        assert not done.returncode
        assert lines[-1].startswith(f"{python} -m {module} ")


@pytest.mark.parametrize(
    ("origin", "page"),
    [
        ("https://host.org/a/b", "https://host.org/a/b"),
        ("https://name:secret@host.org/a/b.git", "https://host.org/a/b"),
        ("http://host.org:8080/a/b/", "http://host.org:8080/a/b"),
        ("git@host.org:a/b.git", "https://host.org/a/b"),
        ("git@host.org:a/b", "https://host.org/a/b"),
        ("ssh://git@host.org/a/b", "https://host.org/a/b"),
        ("ssh://git@host.org:22/a/b.git", "https://host.org/a/b"),
        ("/srv/git/a.git", ""),
        ("../a", ""),
        ("file:///srv/a", ""),
        ("C:/a/b", ""),
        (None, ""),
    ],
)
def test_the_site_links_to_an_origin_that_has_a_page(tmp_path, origin, page):
    """mkdocs aborts for another address than one of http(s)."""
    config = tmp_path / "config"
    config.write_text(f'[remote "origin"]\n\turl = {origin}\n' if origin else "")
    mkdocs = tmp_path / ".venv/bin/mkdocs"
    mkdocs.parent.mkdir(parents=True)
    mkdocs.write_text(f'#!/bin/sh\necho "<$REPO_URL> $*" > {tmp_path}/log\n')
    mkdocs.chmod(0o755)
    done = subprocess.run(
        ["make", "docs", f"VENV={tmp_path / '.venv'}", "-o", f"{tmp_path / '.venv'}/.docs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
        | {"GIT_CONFIG_GLOBAL": str(config), "GIT_DIR": str(tmp_path / "none")},
    )
    assert not done.returncode, done.stderr
    assert (tmp_path / "log").read_text() == f"<{page}> build --strict\n"


def test_an_environment_is_made_where_a_package_is_missing(ran):
    done, lines = ran("test-gpu", False)
    # the stand-in makes none
    assert done.returncode and lines == ["python -m venv .venv"]
