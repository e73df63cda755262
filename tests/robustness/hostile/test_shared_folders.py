"""Files of caches, locks and temporary files in a folder where another user has put its own."""

import json
import os
import stat
import threading

import pytest

from csd.engine.first_call import check as self_check_cache
from csd.engine.first_call import time_steps as step_times_cache
from csd.engine.step.budget import StepTimeTable
from csd.traces.journal import Journal
from csd.traces.traces import Trace, open_traces, write_traces
from csd.utils import cache_folder
from csd.utils.files import WholeFile, open_own, own_folder

VICTIM = b"a file of the user whom csd runs for\n"
TABLE = StepTimeTable([1, 2], [0.1, 0.2])
TRACE = Trace(0, [1, 2], [[3]], 1.0, None)


def as_link(path, victim):
    path.symlink_to(victim)


def as_dangling_link(path, victim):
    path.symlink_to(victim.with_name("absent"))


def as_pipe(path, victim):
    os.mkfifo(path)


def as_folder(path, victim):
    path.mkdir()


PLANTED = pytest.mark.parametrize("plant", [as_link, as_dangling_link, as_pipe, as_folder])


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim"
    path.write_bytes(VICTIM)
    yield path
    assert path.read_bytes() == VICTIM and not (tmp_path / "absent").exists()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own_folder(tmp_path / "csd")
    return tmp_path / "csd"


def in_time(call):
    """Result of a call that must not wait for a pipe's other end."""
    found = []

    def run():
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "blocked"
    return found[0]


@PLANTED
def test_a_planted_lock_neither_blocks_nor_is_followed(plant, victim, cache):
    plant(cache / "steps.lock", victim)

    def call():
        with cache_folder.alone(cache / "steps.json"):
            return "entered"

    assert in_time(call) == "entered"


def test_a_lock_is_not_truncated(cache):
    lock = cache / "steps.lock"
    lock.write_bytes(VICTIM)
    with cache_folder.alone(cache / "steps.json"):
        assert lock.read_bytes() == VICTIM


@PLANTED
def test_a_planted_entry_is_not_read(plant, victim, cache, caplog):
    plant(cache_folder.path_of("steps", "k"), victim)
    assert in_time(lambda: step_times_cache.load_step_times("k")) is None
    assert "step times are measured again" in caplog.text
    plant(cache_folder.path_of("check", "k"), victim)
    assert in_time(lambda: self_check_cache._cached("k")) is None
    assert not in_time(lambda: cache_folder.holds(cache_folder.path_of("check", "k"), "k"))
    if plant is not as_folder:
        # written in its place
        step_times_cache.save_step_times("k", TABLE)
        assert step_times_cache.load_step_times("k").seconds == TABLE.seconds


def test_what_others_own_or_write_is_not_read(cache, caplog):
    step_times_cache.save_step_times("k", TABLE)
    path = cache_folder.path_of("steps", "k")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert step_times_cache.load_step_times("k").seconds == TABLE.seconds
    path.chmod(0o666)
    assert step_times_cache.load_step_times("k") is None
    assert f"can be written by other users: chmod go-w {path}" in caplog.text
    path.chmod(0o600)
    # a folder of this user is made private again
    cache.chmod(0o777)
    assert step_times_cache.load_step_times("k").seconds == TABLE.seconds
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_a_folder_of_another_user_is_not_used(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "csd").mkdir()
    real = os.stat

    def of_another(path, **options):
        found = real(path, **options)
        return os.stat_result([4321 if i == 4 else x for i, x in enumerate(found)])

    monkeypatch.setattr(os, "stat", of_another)
    step_times_cache.save_step_times("k", TABLE)
    monkeypatch.setattr(os, "stat", real)
    assert "belongs to user 4321" in caplog.text
    assert not [*(tmp_path / "csd").iterdir()]


@PLANTED
def test_files_beside_a_history_are_not_followed(plant, victim, tmp_path):
    plant(tmp_path / "h.jsonl.lock", victim)
    with pytest.raises(OSError, match=r"h\.jsonl\.lock"):
        raise in_time(lambda: Journal(tmp_path / "h.jsonl"))
    # a file that no history has open
    in_time(lambda: write_traces(open_traces(tmp_path / "h.jsonl"), [TRACE]))
    assert (tmp_path / "h.jsonl").read_text().count("\n") == 1
    plant(tmp_path / "other.jsonl.new", victim)
    journal = Journal(tmp_path / "other.jsonl")
    journal.append(TRACE)
    before = journal.path.read_bytes()
    assert isinstance(in_time(lambda: journal.rewrite([TRACE, TRACE])), OSError)
    assert journal.path.read_bytes() == before
    journal.close()


@PLANTED
def test_a_temporary_file_of_an_output_is_not_followed(plant, victim, tmp_path):
    plant(tmp_path / "out.json.new", victim)
    with pytest.raises(OSError, match=r"out\.json"):
        raise in_time(lambda: WholeFile(tmp_path / "out.json"))
    assert not (tmp_path / "out.json").exists()


def test_the_message_is_the_remedy(tmp_path):
    path = tmp_path / "entry"
    path.write_text(json.dumps({}))
    path.chmod(0o664)
    with pytest.raises(OSError, match="chmod go-w") as caught:
        open_own(path, os.O_RDONLY)
    command = str(caught.value.strerror).split(": ")[-1]
    assert os.system(command) == 0
    os.close(open_own(path, os.O_RDONLY))
