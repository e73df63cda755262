"""numba's cache of compiled loops: two processes, sources that change, and the notice."""

import importlib
import pkgutil
import sys
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest

pytest.importorskip("numba")

from numba import njit

import csd.kernels
from csd.kernels.numba import cache, jit
from csd.kernels.numba.cache import Files
from csd.kernels.numba.dispatch import LoopDispatcher


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


def test_code_is_stale_when_a_file_that_it_imports_has_changed(tmp_path, monkeypatch):
    imported = {
        "kernels/draft/cpu/grow.py": "from csd.kernels.draft import constants\n",
        "kernels/draft/__init__.py": "if f:\n    from csd.state.pool import (\n        A,\n    )\n",
        "kernels/draft/constants.py": "import csd.kernels.common.noise as noise\n",
        "kernels/common/noise.py": "from csd.kernels.draft.cpu.grow import grow\n",
        "state/pool.py": "",
    }
    other = {"state/prefix_cache.py": "", "kernels/draft/reference.py": "", "graph/prior.py": ""}
    for name, text in (imported | other).items():
        path = tmp_path / "csd" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(jit, "ROOT", tmp_path)
    monkeypatch.setattr(jit, "_imported", jit._imported.__wrapped__)
    loop = tmp_path / "csd/kernels/draft/cpu/grow.py"
    stale = []
    for name, text in (imported | other).items():
        before = jit.stamp.__wrapped__(loop)
        (tmp_path / "csd" / name).write_text(text + "# changed\n")
        if jit.stamp.__wrapped__(loop) != before:
            stale.append(name)
    assert stale == list(imported)


def test_the_digest_of_every_loop_has_the_sources_of_all_functions_that_it_calls():
    for info in pkgutil.walk_packages(csd.kernels.__path__, "csd.kernels."):
        if ".cpu" in info.name or ".numba" in info.name:
            importlib.import_module(info.name)
    modules = [module for name, module in sys.modules.items() if name.startswith("csd.kernels")]
    found = {
        x for module in modules for x in vars(module).values() if isinstance(x, LoopDispatcher)
    }
    assert len(found) > 50
    for dispatcher in found:
        root = source(dispatcher.py_func)
        digested = jit.sources(root)
        unread, seen = [dispatcher.py_func], set()
        while unread:
            function = unread.pop()
            seen.add(function)
            for name in function.__code__.co_names:
                value = getattr(
                    function.__globals__.get(name), "py_func", function.__globals__.get(name)
                )
                if isinstance(value, FunctionType) and value.__module__.startswith("csd."):
                    assert source(value) in digested, f"{value} of {dispatcher}"
                    if value not in seen:
                        unread.append(value)


def source(function):
    return Path(function.__code__.co_filename)


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
