"""The script of a lent GPU's two calls: what it runs, carries and returns."""

import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.gpu.aot import SHAPES
from bench.gpu.sections import compile as compile_ahead

pytestmark = pytest.mark.bench

ROOT = Path(__file__).parents[3]
# notes its arguments, leaves a binary in Triton's cache, and ends with a code of its own
STAND_IN = """#!/bin/sh
echo "$*" >> "$LOG"
case "$*" in
    *sections.compile*) mkdir -p "$TRITON_CACHE_DIR/k"; echo new > "$TRITON_CACHE_DIR/k/a.cubin";;
    *bench.gpu*) cat "$TRITON_CACHE_DIR"/k/*; echo "RuntimeError: of a section"; exit {code} ;;
    *pytest*) echo "3 passed"; exit {tests} ;;
esac
"""


@pytest.fixture
def lent(tmp_path):
    """lent(what, code, tests): runs the script with a stand-in; the exit code, output and lines."""
    root, script = tmp_path / "tree", "bench/gpu/lent.sh"
    (root / script).parent.mkdir(parents=True)
    shutil.copy(ROOT / script, root / script)
    folders = dict(OUT=tmp_path / "out", TRITON_CACHE_DIR=tmp_path / "cache", LOG=tmp_path / "log")

    def run(what, code=0, tests=0):
        (tmp_path / "python").write_text(STAND_IN.format(code=code, tests=tests))
        (tmp_path / "python").chmod(0o755)
        folders["LOG"].write_text("")
        done = subprocess.run(
            ["bash", script, what],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ
            | {"PYTHON": str(tmp_path / "python")}
            | {name: str(path) for name, path in folders.items()},
        )
        lines = folders["LOG"].read_text().splitlines()
        return SimpleNamespace(code=done.returncode, text=done.stdout, lines=lines)

    return SimpleNamespace(run=run, root=root, **folders)


def test_kernels_are_carried_to_both_calls(lent):
    assert lent.run("carry").lines == ["-m bench.gpu.sections.compile sm_90"]
    shutil.rmtree(lent.TRITON_CACHE_DIR)
    first = lent.run("1")
    # at the path at which it was made
    assert (lent.TRITON_CACHE_DIR / "k" / "a.cubin").read_text() == "new\n"
    assert first.code == 0 and "new" in first.text and "3 passed" in first.text
    tests, bench = sorted(first.lines, key=lambda line: "bench.gpu" in line)
    assert "-m bench.gpu --call 1" in bench and f"--into {lent.OUT}/first.json" in bench
    files = [word for word in tests.split() if word.startswith("tests/")]
    assert len(files) > 10 and all((ROOT / file).is_file() for file in files)
    # and from the first call to the second one
    shutil.move(lent.OUT / "triton.tgz", lent.root / ".gpu" / "triton.tgz")
    shutil.rmtree(lent.TRITON_CACHE_DIR)
    assert "new" in lent.run("2").text
    assert {p.name for p in lent.OUT.iterdir()} == {"first.log", "tests.log", "second.log"} | {
        p.name for p in lent.OUT.glob("*.json")
    }
    with tarfile.open(lent.root / ".gpu" / "triton.tgz") as packed:
        assert any(name.endswith("k/a.cubin") for name in packed.getnames())


def test_the_second_call_gets_the_results_of_the_first_if_there_are_any(lent):
    (line,) = lent.run("2").lines
    assert "--kept" not in line and f"--into {lent.OUT}/second.json" in line
    (lent.root / ".gpu").mkdir()
    (lent.root / ".gpu" / "first.json").write_text("{}")
    (line,) = lent.run("2").lines
    assert "-m bench.gpu --call 2 --kept .gpu/first.json" in line


def test_failures_are_returned_and_shown(lent):
    assert [lent.run("1", code, tests).code for code, tests in ((3, 0), (0, 1), (3, 1))] == [
        3,
        1,
        3,
    ]
    second = lent.run("2", 3)
    assert second.code == 3
    assert "1 RuntimeError: of a section" in second.text and "exit code 3" in second.text
    assert lent.run("0").code == 2


def test_results_fit_what_comes_back(lent):
    """A few files: a machine may return eight."""
    lent.run("1")
    lent.run("2")
    assert len([*lent.OUT.iterdir()]) <= 8


def test_kernels_of_both_calls_are_compiled(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    asked = []

    def compiled(tasks, processes, cache):
        asked.extend(tasks)
        assert cache == str(tmp_path)
        rows = [
            dict(
                kernel=f"verify {dtype}",
                target=target,
                dtype=dtype,
                shared=1,
                limit=2,
                spills=0,
                stack=0,
            )
            for target, dtype, _ in tasks
        ]
        return [*rows, dict(kernel="scan", error="no such instruction")] if broken else rows

    monkeypatch.setattr(compile_ahead, "compile_all", compiled)
    broken = False
    assert compile_ahead.main("sm_90") == 0
    assert [(dtype, shape.name) for _, dtype, shape in asked] == [
        ("fp32", "tiny"),
        *(("bf16", shape.name) for shape in SHAPES[:2]),
    ]
    broken = True
    assert compile_ahead.main("sm_90") == 1
    printed = capsys.readouterr()
    assert "3 of 4 kernels" in printed.out and "scan: no such instruction" in printed.err
