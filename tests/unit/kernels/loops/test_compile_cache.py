"""Neither files in numba's cache nor a folder without write access change a loop's result."""

import errno
import os
import pickle
import random
import shutil
from itertools import count

import pytest
from helpers.targets import few

pytest.importorskip("numba")

from numba.core.caching import _CacheLocator
from numba.core.serialize import dumps

from csd.kernels.numba import cache, jit


def double(x):
    return 2 * x


def triple(x):
    return 3 * x


RESULT = [2.0, 3.0]


@pytest.fixture
def once(monkeypatch):
    for notice in (cache.UNREAD, cache.UNKEPT):
        monkeypatch.setattr(notice, "done", False)


@pytest.fixture
def folder(tmp_path, monkeypatch, once):
    """The folder of two loops that were compiled."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    assert run() == (RESULT, 0)
    (found,) = tmp_path.iterdir()
    assert len([*found.glob("*.nbi")]) == len([*found.glob("*.nbc")]) == 2
    return found


def run():
    """Results of the loops, as another process has them, and the number read from files."""
    loops = [jit.loop(double), jit.loop(triple)]
    results = [loop(1.0) for loop in loops]
    return results, sum(sum(loop.stats.cache_hits.values()) for loop in loops)


def logged(caplog):
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return [text for text in found if "and caches them" not in text]


def test_whole_files_are_read_in_silence(folder, caplog):
    caplog.clear()
    assert run() == (RESULT, 2) and logged(caplog) == []


def torn(data):
    sizes = {0, 31, 32, 33, len(data) // 2, len(data) - 1}
    return [data[:size] for size in sorted(sizes)]


def others(data, path):
    draw = random.Random(0)
    noise = draw.randbytes(len(data))
    flipped = []
    for place in (0, 33, len(data) // 2):
        flipped.append(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    # as numba itself writes them, of another size, and whole pickles of something else
    pickles = [pickle.dumps(x) for x in (None, (1, 2), "text", (data, {}), [b""])]
    names = [pickle.dumps("0.1"), dumps(("stamp", {}))]
    beside = [x.read_bytes() for x in path.parent.iterdir() if x != path]
    return [
        noise,
        b"\0" * len(data),
        data + b"x",
        data[32:],
        *flipped,
        *pickles,
        b"".join(names),
        *beside,
    ]


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_a_file_with_other_content_is_as_none(kind, folder, caplog):
    """Torn, changed, another's or empty: the loop is compiled anew, which is logged once, kept."""
    path = sorted(folder.glob(f"*.{kind}"))[0]
    data = path.read_bytes()
    for other in torn(data) + others(data, path):
        cache.UNREAD.done = False
        caplog.clear()
        path.write_bytes(other)
        assert run() == (RESULT, 1)
        (text,) = logged(caplog)
        assert text.startswith("a compiled kernel could not be loaded") and str(path) in text
        # it was replaced
        assert run() == (RESULT, 2) and logged(caplog) == []
        data = path.read_bytes()


def test_a_message_is_logged_once(folder, caplog):
    for path in folder.iterdir():
        path.write_bytes(b"")
    caplog.clear()
    assert run() == (RESULT, 0)
    assert len(logged(caplog)) == 1


def without_index(folder):
    for path in folder.glob("*.nbi"):
        path.unlink()


def without_data(folder):
    for path in folder.glob("*.nbc"):
        path.unlink()


def without_folder(folder):
    shutil.rmtree(folder)


@pytest.mark.parametrize("remove", [without_index, without_data, without_folder])
def test_what_is_removed_is_compiled_in_silence(remove, folder, caplog):
    remove(folder)
    caplog.clear()
    assert run() == (RESULT, 0) and logged(caplog) == []
    assert run() == (RESULT, 2)


def test_what_is_removed_while_the_process_runs_is_written_again(folder):
    loops = [jit.loop(double), jit.loop(triple)]
    shutil.rmtree(folder)
    assert [loop(1.0) for loop in loops] == RESULT
    assert run() == (RESULT, 2)


def folders_in_place_of_files(folder):
    for path in folder.iterdir():
        path.unlink()
        path.mkdir()


def file_in_place_of_the_folder(folder):
    shutil.rmtree(folder)
    folder.write_text("a file")


def links_to_themselves(folder):
    for path in folder.iterdir():
        path.unlink()
        path.symlink_to(path)


@pytest.mark.parametrize(
    "spoil", [folders_in_place_of_files, file_in_place_of_the_folder, links_to_themselves]
)
def test_what_is_no_file_ends_no_call(spoil, folder):
    loops = [jit.loop(double), jit.loop(triple)]
    spoil(folder)
    assert [loop(1.0) for loop in loops] == RESULT
    assert run()[0] == RESULT


@few(4)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
@pytest.mark.parametrize("after", range(6))
def test_a_write_that_fails_ends_no_call(number, after, folder, monkeypatch, caplog):
    """From any of them on: each of two loops tries its folder and writes an index and its code."""
    shutil.rmtree(folder)
    loops, written = [jit.loop(double), jit.loop(triple)], count()

    def failing(method):
        def call(*args):
            if next(written) >= after:
                raise OSError(number, os.strerror(number))
            return method(*args)

        return call

    caplog.clear()
    with monkeypatch.context() as patch:
        for owner, name in ((_CacheLocator, "ensure_cache_path"), (cache.Files, "_write")):
            patch.setattr(owner, name, failing(getattr(owner, name)))
        assert [loop(1.0) for loop in loops] == RESULT
    (text,) = logged(caplog)
    assert text.startswith("csd cannot cache") and os.strerror(number) in text
    assert run()[0] == RESULT
    assert run() == (RESULT, 2)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_leaves_no_part_of_a_file(folder, monkeypatch, caplog):
    without_folder(folder)
    opened = open

    def full(path, mode="r", *args, **options):
        if "w" in mode and ".tmp." in str(path):
            opened(path, mode).close()
            return opened("/dev/full", mode, *args, **options)
        return opened(path, mode, *args, **options)

    loops = [jit.loop(double), jit.loop(triple)]
    caplog.clear()
    with monkeypatch.context() as patch:
        patch.setattr("numba.core.caching.open", full, raising=False)
        assert [loop(1.0) for loop in loops] == RESULT
    assert "No space left" in logged(caplog)[0]
    assert [*folder.iterdir()] == []


def test_without_any_folder_that_can_be_written_loops_are_compiled(monkeypatch, once, caplog):
    def refuse(self):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(_CacheLocator, "ensure_cache_path", refuse)
    assert run() == (RESULT, 0)
    (text,) = logged(caplog)
    assert text.startswith("csd cannot cache")


def test_another_users_file_is_not_unpickled(folder, monkeypatch, caplog):
    """A folder that all can write to may hold what runs when it is read."""
    owner = os.geteuid() + 1
    real = os.fstat

    def of_another(file):
        return os.stat_result([owner if i == 4 else x for i, x in enumerate(real(file))])

    monkeypatch.setattr(os, "fstat", of_another)
    caplog.clear()
    assert run() == (RESULT, 0)
    assert f"belongs to user {owner}" in logged(caplog)[0]
    monkeypatch.setattr(os, "fstat", real)
    assert run() == (RESULT, 2)


def test_files_of_those_who_own_the_sources_are_read(folder, monkeypatch):
    """The files are those of a package that another user installed and compiled."""
    monkeypatch.setattr(cache.os, "geteuid", lambda: os.stat(__file__).st_uid + 1)
    assert run() == (RESULT, 2)


def test_an_index_of_other_sources_is_not_unpickled(folder, caplog):
    """Classes that its loops' arguments were of may be gone."""
    for path in folder.glob("*.nbi"):
        version, _stamp, _overloads = pickle.loads(path.read_bytes()[32:])
        index = pickle.dumps((version, "other sources", b"of a class that is gone"))
        path.write_bytes(cache._digest(str(path), index) + index)
    caplog.clear()
    assert run() == (RESULT, 0) and logged(caplog) == []
    assert run() == (RESULT, 2)
