"""Processes that csd starts import nothing from the working folder, and the same as this one."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from csd.engine.first_call import check as self_check_cache
from csd.utils import isolated_python

NAMES = ["json", "torch", "numpy", "numba", "triton", "importlib", "encodings", "sitecustomize"]
MAIN = """
import json, os, sys

def main(arguments):
    print(json.dumps([arguments, sys.modules["csd"].__file__, json.__file__, sys.path]))
    return 7
"""
PATHS = {
    "as it is": ([], None),
    "an empty entry": ([""], None),
    "a dot": (["."], None),
    "its name": (["{here}"], None),
    "another name": (["{here}/../link"], None),
    "PYTHONPATH's empty entry": ([], ":{extra}"),
    "PYTHONPATH's last empty entry": ([], "{extra}:"),
    "PYTHONPATH of it alone": ([], "{here}"),
    "PYTHONPATH's dot": ([], ".:{extra}"),
    "an entry that is no name": ([7], None),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working folder, with files that note that they ran, beside a link to it."""
    folder = tmp_path / "here"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    for name in NAMES:
        ran = f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n"
        (folder / f"{name}.py").write_text(ran)
    monkeypatch.chdir(folder)
    return folder


def package(folder, **modules):
    for name, text in {"__init__": "", **modules}.items():
        (folder / "csd").mkdir(parents=True, exist_ok=True)
        (folder / "csd" / f"{name}.py").write_text(text)
    return folder


def ran(here):
    return (here.parent / "ran").exists()


def run(module, *arguments):
    return subprocess.run(
        isolated_python.command(module, [*arguments]),
        env=isolated_python.environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("is_here", [False, True], ids=["csd elsewhere", "csd in it"])
@pytest.mark.parametrize("entries, variable", PATHS.values(), ids=PATHS)
def test_planted_files_do_not_run(entries, variable, is_here, here, tmp_path, monkeypatch):
    root = package(here if is_here else tmp_path / "root", job=MAIN)
    monkeypatch.setattr(isolated_python, "ROOT", root)
    extra = tmp_path / "extra"
    extra.mkdir()
    named = dict(here=here, extra=extra)
    entries = [x.format(**named) if isinstance(x, str) else x for x in entries]
    monkeypatch.setattr(sys, "path", [*entries, str(extra), *sys.path])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if variable is not None:
        monkeypatch.setenv("PYTHONPATH", variable.format(**named))
    done = run("csd.job", "a", "{b} c")
    assert done.returncode == 7, done.stderr
    arguments, file, read, path = json.loads(done.stdout)
    assert arguments == ["a", "{b} c"] and file == str(root / "csd/__init__.py")
    assert read == json.__file__ and not ran(here)
    # what this process finds on a path that was edited, the other one does too
    assert str(extra) in path and not any(os.path.realpath(x) == str(here) for x in path)


def test_a_working_folder_of_the_interpreter_stays(tmp_path, monkeypatch):
    """The case of a user who works in site-packages."""
    monkeypatch.setattr(isolated_python, "ROOT", package(tmp_path, job=MAIN))
    home = os.path.dirname(json.__path__[0])
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    _, _, read, path = json.loads(run("csd.job").stdout)
    assert read == json.__file__ and home in path


def test_a_working_folder_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(isolated_python, "ROOT", package(tmp_path, job=MAIN))
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert run("csd.job").returncode == 7


def test_the_check_of_a_gpu_begins_away_from_the_working_folder(here, monkeypatch):
    """csd itself: where it is refused its device, it has been imported."""
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(self_check_cache.torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setenv("XDG_CACHE_HOME", str(here.parent))
    sizes = SimpleNamespace(heads=3, kv_heads=2, head_dim=16, vocab=499)
    with pytest.raises(RuntimeError, match="heads must be a multiple of kv_heads"):
        self_check_cache.require_check("cuda", self_check_cache.torch.float32, sizes)
    assert not ran(here)


def test_a_check_that_cannot_begin_is_an_error_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(self_check_cache.torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    sizes = SimpleNamespace(heads=3, kv_heads=2, head_dim=16, vocab=499)
    with pytest.raises(RuntimeError, match=r"no process can be started: .*No such file"):
        self_check_cache.require_check("cuda", self_check_cache.torch.float32, sizes)
