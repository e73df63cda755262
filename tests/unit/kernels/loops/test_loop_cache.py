"""numba's cache of compiled loops: two processes, sources that change, and the notice."""

from types import FunctionType

import numpy as np
import pytest

pytest.importorskip("numba")

from numba import njit

from csd.kernels.numba import cache, jit
from csd.kernels.numba.cache import Files


def add_one(x):
    x[0] += 1
    return x[0]


def test_files_of_two_processes_stay_apart(tmp_path, monkeypatch):
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    late, write = [], Files._save_data
    monkeypatch.setattr(cache, "PROCESS", "first")
    first = jit.loop(add_one)
    monkeypatch.setattr(cache, "PROCESS", "second")
    second = jit.loop(add_one)
    with monkeypatch.context() as both:
        # neither sees what the other one writes: their indices and the first's code come late
        both.setattr(Files, "_load_index", lambda self: {})
        both.setattr(Files, "_save_data", lambda *args: late.append(args))
        first(np.zeros(1))
        both.setattr(Files, "_save_data", write)
        second(np.zeros(1, np.int32))
        write(*late[0])
    third = jit.loop(add_one)
    assert third(np.zeros(1, np.int32)) == 1
    assert sum(third.stats.cache_hits.values()) == 1
    assert third(np.full(1, 0.5)) == 1.5
    assert sum(third.stats.cache_hits.values()) == 1


def test_code_is_stale_when_a_file_that_it_may_contain_has_changed(tmp_path, monkeypatch):
    names = [
        "kernels/draft/cpu/grow.py",
        "kernels/draft/cpu/step/find.py",
        "state/pool.py",
        "kernels/verify/constants.py",
        "graph/history.py",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.setattr(jit, "CSD", tmp_path)
    monkeypatch.setattr(jit, "_sources", jit._sources.__wrapped__)
    stale = []
    for name in names:
        before = jit.stamp.__wrapped__(tmp_path / "kernels/draft/cpu/grow.py")
        (tmp_path / name).write_text("# changed\n")
        if jit.stamp.__wrapped__(tmp_path / "kernels/draft/cpu/grow.py") != before:
            stale.append(name)
    assert stale == names[:4]


def test_a_compiled_loop_is_found_only_with_its_stamp(tmp_path, monkeypatch):
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    hits = []
    for stamp in ("1", "1", "2", "2"):
        monkeypatch.setattr(jit, "stamp", lambda file, stamp=stamp: stamp)
        found = jit.loop(add_one)
        found(np.zeros(1))
        hits.append(sum(found.stats.cache_hits.values()))
    assert hits == [0, 1, 0, 1]


def test_what_compiles_is_logged_once(monkeypatch, caplog):
    """Only csd's own loops are logged, not a user's."""
    monkeypatch.setattr(jit.NOTICE, "done", False)

    def one():
        return 1

    def compiles(module):
        function = FunctionType(one.__code__, globals())
        function.__module__ = module
        return njit(function)() and [record.name for record in caplog.records]

    assert compiles("user.loops") == []
    # as of code that was given as text
    assert compiles(None) == []
    assert compiles("csd.kernels.numba.some") == ["csd"]
    assert compiles("csd.kernels.numba.other") == ["csd"]
    assert "and caches them" in caplog.text
