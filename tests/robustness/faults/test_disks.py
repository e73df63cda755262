"""Folders without room, or that are read-only: an error that names the file, and nothing torn."""

import json
import os
import subprocess

import pytest
from faults import assert_usable

import csd
from csd.cli.main import main
from csd.evaluate.resumable_results import ResumedFile
from csd.models.demo import toy
from csd.traces.traces import Trace, read_traces, write_traces

SAY = dict(num_samples=2, max_new_tokens=8, seed=0, temperature=0.8)


def mounted(folder, options):
    """True if a tmpfs lies on `folder` now."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True
    )
    return done.returncode == 0


@pytest.fixture
def small(tmp_path):
    """A folder with room for 16 KiB."""
    if not mounted(tmp_path, "size=16k"):
        pytest.skip("mounting a tmpfs is not permitted here")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.fixture
def read_only(tmp_path):
    (tmp_path / "folder").mkdir()
    folder = tmp_path / "folder"
    if not mounted(folder, "ro"):
        if os.geteuid() == 0:
            pytest.skip("mounting a tmpfs is not permitted here, and root may write anywhere")
        folder.chmod(0o500)
        yield folder
        folder.chmod(0o700)
        return
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_run_on_a_full_disk_goes_on_where_there_is_room(small):
    path, settings = small / "out.jsonl", {"a": 1}
    row = {"text": "x" * 3000}
    results = ResumedFile(path, settings, lambda i, row: None, "file")
    with pytest.raises(OSError, match=r"No space left.*out.jsonl"):
        for _ in range(8):
            results.add([row])
    results.close()
    data = path.read_bytes()
    assert subprocess.run(["mount", "-o", "remount,size=64k", str(small)]).returncode == 0
    again = ResumedFile(path, settings, lambda i, row: None, "file")
    # only whole lines count, and none is lost
    assert again.rows == [row] * (data.count(b"\n") - 1)
    again.add([row] * (8 - len(again.rows)))
    again.close()
    assert len(path.read_bytes().splitlines()) == 9


def test_a_recording_on_a_full_disk(small):
    """Neither a torn trace file nor a broken engine."""
    path = small / "t.jsonl"
    whole = [Trace(0, [1], [[2]], 1.0, None)]
    write_traces(path, whole)
    with pytest.raises(OSError, match="No space left"):
        write_traces(path, [Trace(0, [1], [[2] * 20_000], 1.0, None)])
    assert list(read_traces(path)) == whole
    assert [p.name for p in small.iterdir()] == ["t.jsonl"]
    model, tokenizer = toy()
    engine = csd.Engine(model, tokenizer=tokenizer)
    expected = csd.generate(engine, "ab", **SAY).tokens
    (small / "rest").write_bytes(b"x" * (os.statvfs(small).f_bavail * os.statvfs(small).f_bsize))
    with pytest.raises(OSError, match="No space left"):
        csd.generate(engine, "ab", record=str(small / "new.jsonl"), **SAY)
    assert not (small / "new.jsonl").exists()
    assert_usable(engine, "ab", expected, **SAY)


def test_a_history_that_cannot_be_rewritten(small):
    """Five lines of 2.4 KB and a mark have room, but not two lines more beside them."""
    path = small / "h.jsonl"
    with csd.History(samples=2, tokens=1200, path=path) as h:
        with pytest.raises(OSError, match=r"No space left.*h.jsonl.new"):
            for i in range(101, 199):
                h.add([1], [[i] * 570])
        # the addition itself is there
        assert [e.tokens[0] for e in h.of([1])] == [105, 104]
        assert [t.samples[0][0] for t in read_traces(path)] == [101, 102, 103, 104, 105]
        assert sorted(p.name for p in small.iterdir()) == ["h.jsonl", "h.jsonl.lock"]
        assert subprocess.run(["mount", "-o", "remount,size=64k", str(small)]).returncode == 0
        h.add([1], [[106] * 570])
    assert [t.samples for t in read_traces(path)] == [[[105] * 570], [[106] * 570]]
    with csd.History(samples=2, path=path) as h:
        assert [e.tokens[0] for e in h.of([1])] == [106, 105]


def test_a_command_on_a_full_disk(small, toy_folder, capsys):
    problems = small / "problems.jsonl"
    problems.write_text(json.dumps({"prompt": "a", "answer": "1"}) + "\n")
    room = os.statvfs(small).f_bavail * os.statvfs(small).f_bsize
    (small / "rest").write_bytes(b"x" * room)
    out = small / "out.jsonl"
    arguments = ["eval", str(problems), "--model", toy_folder, "-o", str(out), "--quiet", "-n", "1"]
    assert main([*arguments, "--max-new-tokens", "4"]) == 2
    assert f"{out}: No space left on device" in capsys.readouterr().err
    csd.release()


def test_a_folder_that_is_read_only(read_only, tmp_path, toy_folder, capsys):
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps({"prompt": "a", "answer": "1"}) + "\n")
    out = read_only / "out.jsonl"
    for arguments in (
        ["eval", str(problems), "--model", toy_folder, "-o", str(out)],
        ["record", toy_folder, str(problems), "-o", str(out)],
        ["sample", toy_folder, "a", "--record", str(out)],
        ["sample", toy_folder, "a", "--history", str(out)],
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert str(read_only) in error and "Traceback" not in error
    with pytest.raises(OSError, match="record must be a file in a writable folder"):
        csd.generate(toy_folder, "ab", record=str(out), **SAY)
    csd.release()
