"""Files of caches and histories that a killed process or a full disk has left in part."""

import errno
import json
import os

import pytest

import csd
from csd.engine.first_call import check as self_check_cache
from csd.engine.first_call import time_steps as step_times_cache
from csd.engine.step.budget import StepTimeTable
from csd.traces.traces import read_traces
from csd.utils import cache_folder

TABLE = StepTimeTable([1, 2, 4], [0.1, 0.2, 0.3])
KEY = json.dumps(["cpu", "model", "text " * 20])


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "csd"


def cuts(data):
    """The file as it was cut at lengths from nothing to all but a byte."""
    return [data[:size] for size in sorted({0, 1, 2, len(data) - 1, *range(0, len(data), 17)})]


def test_step_times_that_were_cut_are_measured_again(cache, caplog):
    step_times_cache.save_step_times(KEY, TABLE)
    path = cache_folder.path_of("steps", KEY)
    data = path.read_bytes()
    for part in cuts(data):
        path.write_bytes(part)
        caplog.clear()
        assert step_times_cache.load_step_times(KEY) is None
        assert "step times are measured again" in caplog.text
        step_times_cache.save_step_times(KEY, TABLE)
        assert path.read_bytes() == data
    assert step_times_cache.load_step_times(KEY).seconds == TABLE.seconds


@pytest.mark.parametrize("kind", ["check", "kernels"])
def test_a_mark_that_was_cut_is_none(cache, kind):
    path = cache_folder.path_of(kind, KEY)
    assert not cache_folder.holds(path, KEY)
    for part in cuts(KEY.encode()):
        cache_folder.save(path, KEY)
        assert cache_folder.holds(path, KEY) and self_check_cache._cached(KEY) in (KEY, None)
        path.write_bytes(part)
        assert not cache_folder.holds(path, KEY)
        if kind == "check":
            assert self_check_cache._cached(KEY) != KEY


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_cache_on_a_full_disk_is_left_as_it_was(cache, monkeypatch, caplog):
    step_times_cache.save_step_times(KEY, TABLE)
    path = cache_folder.path_of("steps", KEY)
    data, opened = path.read_bytes(), cache_folder.open_own

    def full(path, flags):
        file = opened(path, flags)
        if flags & os.O_EXCL:
            os.close(file)
            file = os.open("/dev/full", os.O_WRONLY)
        return file

    monkeypatch.setattr(cache_folder, "open_own", full)
    step_times_cache.save_step_times(KEY, StepTimeTable([1, 2], [0.1, 0.2]))
    assert "step times cannot be cached" in caplog.text and "No space left" in caplog.text
    assert [p.name for p in cache.iterdir()] == [path.name] and path.read_bytes() == data


@pytest.mark.parametrize("room", [0, 1, 30, 150, 300])
def test_a_history_on_a_full_disk_goes_on_where_there_is_room(tmp_path, monkeypatch, room):
    """room: bytes that the disk takes before it is full."""
    path, write, left = tmp_path / "h.jsonl", os.write, [10**6]

    def limited(file, data):
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        size = write(file, data[: left[0]])
        left[0] -= size
        return size

    monkeypatch.setattr(os, "write", limited)
    with csd.History(samples=9, path=path) as history:
        history.add([1], [[2, 3]])
        left[0] = room
        with pytest.raises(OSError, match=r"No space left.*h.jsonl"):
            history.add([1], [[5] * 400])
        assert [trace.samples for trace in read_traces(path)] == [[[2, 3]]]
        left[0] = 10**6
        history.add([1], [[7]])
    want = [[[2, 3]], [[7]]]
    assert [trace.samples for trace in read_traces(path)] == want
    with csd.History(samples=9, path=path) as history:
        assert [past.tokens.tolist() for past in history.of([1])] == [[7], [2, 3]]
