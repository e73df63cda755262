"""Compiled loops that two processes write to one folder at once are found again as they were."""

import numpy as np
import pytest

pytest.importorskip("numba")

from numba.core.caching import IndexDataCacheFile

from csd.kernels.cpu import numbers


def add_one(x):
    x[0] += 1
    return x[0]


def test_files_of_two_processes_stay_apart(tmp_path, monkeypatch):
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    late, write = [], IndexDataCacheFile._save_data
    monkeypatch.setattr(numbers, "PROCESS", "first")
    first = numbers.loop(add_one)
    monkeypatch.setattr(numbers, "PROCESS", "second")
    second = numbers.loop(add_one)
    with monkeypatch.context() as both:
        # neither sees what the other one writes: their indices and the first's code come late
        both.setattr(IndexDataCacheFile, "_load_index", lambda self: {})
        both.setattr(IndexDataCacheFile, "_save_data", lambda *args: late.append(args))
        first(np.zeros(1))
        both.setattr(IndexDataCacheFile, "_save_data", write)
        second(np.zeros(1, np.int32))
        write(*late[0])
    third = numbers.loop(add_one)
    assert third(np.zeros(1, np.int32)) == 1
    assert sum(third.stats.cache_hits.values()) == 1
    assert third(np.full(1, 0.5)) == 1.5
    assert sum(third.stats.cache_hits.values()) == 1
