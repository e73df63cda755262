"""Files that calls write: tried before the first step, and whole where one is moved meanwhile."""

import json
import os
from pathlib import Path

import pytest
from faults import OPTIONS, PROMPTS, Never

import csd
from csd.evaluate.resumable_results import ResumedFile
from csd.traces.traces import read_traces


@pytest.fixture
def unwritable(tmp_path):
    """Paths that cannot be written, though the folder can: by what is there."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "part.new").mkdir()
    return {
        "full": "/dev/full",
        "folder": tmp_path / "folder",
        "part": tmp_path / "part",
    }


@pytest.mark.parametrize("path", ["full", "folder", "part"])
@pytest.mark.parametrize("call", [csd.generate, csd.stream], ids=["generate", "stream"])
def test_a_recording_is_tried_before_the_first_step(e, expected, unwritable, path, call):
    with pytest.raises(OSError, match=str(unwritable[path])) as caught:
        list(call(e, PROMPTS, record=str(unwritable[path]), callback=Never(), **OPTIONS))
    assert not hasattr(caught.value, "samples")
    assert [out.tokens for out in csd.generate(e, PROMPTS, **OPTIONS)] == expected


@pytest.mark.parametrize("name", ["h.jsonl", "h.jsonl.lock", "h.jsonl.new", "link.jsonl"])
def test_history_and_recording_are_different_files(e, tmp_path, name):
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "h.jsonl")
    with csd.History(path=tmp_path / "h.jsonl") as history:
        options = dict(record=str(tmp_path / name), callback=Never(), **OPTIONS)
        with pytest.raises(ValueError, match="record must be another file than that of history"):
            csd.generate(e, PROMPTS, history=history, **options)
        # whoever has it open
        if name in ("h.jsonl", "link.jsonl"):
            with pytest.raises(ValueError, match=f"{name} is open as a History"):
                csd.generate(e, PROMPTS, **options)
    csd.generate(e, PROMPTS, record=str(tmp_path / name), **OPTIONS)
    assert len(list(read_traces(tmp_path / name))) == 2


def test_a_history_that_is_removed_while_it_is_open(e, expected, tmp_path):
    path = tmp_path / "h.jsonl"
    with csd.History(path=path) as history:
        history.add([1, 2], [[3, 4]])
        path.unlink()
        # also with the file that keeps others out
        (tmp_path / "h.jsonl.lock").unlink()
        csd.generate(e, PROMPTS, history=history, **OPTIONS)
        assert [t.samples for t in read_traces(path)] == [[[3, 4]], *expected]
        with pytest.raises(ValueError, match="is open in another History"):
            csd.History(path=path)

        def remove(*args):
            path.unlink(missing_ok=True)

        csd.generate(e, PROMPTS, history=history, callback=remove, **OPTIONS)
        assert len(list(read_traces(path))) == 5
    with csd.History(path=path) as again:
        assert len(again) == 3


def test_a_history_that_is_replaced_while_it_is_open(e, expected, tmp_path):
    """The other file stays as it is; what was drawn is in the error, or nothing is drawn."""
    path = tmp_path / "h.jsonl"

    def replace(*args):
        (tmp_path / "other").write_text("a note\n")
        os.replace(tmp_path / "other", path)

    with csd.History(path=path) as history:
        with pytest.raises(ValueError, match="has been replaced by another") as caught:
            csd.generate(e, PROMPTS, history=history, callback=replace, **OPTIONS)
        assert [out.tokens for out in caught.value.samples] == expected
        with pytest.raises(ValueError, match="has been replaced by another") as caught:
            csd.generate(e, PROMPTS, history=history, callback=Never(), **OPTIONS)
    assert path.read_text() == "a note\n"


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_files_that_are_read_again_are_regular(tmp_path, kind):
    path = {"pipe": tmp_path / "pipe", "device": Path("/dev/full"), "folder": tmp_path}[kind]
    if kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(ValueError, match=f"{path} must be a regular file"):
        csd.History(path=path)
    with pytest.raises(ValueError, match=f"{path} must be a regular file"):
        ResumedFile(path, {}, lambda i, row: None, "file")


def test_a_recording_into_a_pipe(e, expected, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    csd.generate(e, PROMPTS, record=str(pipe), **OPTIONS)
    lines = os.read(reader, 1 << 20).splitlines()
    assert [json.loads(line)["samples"] for line in lines] == expected

    def leave(*args):
        nonlocal reader
        if reader is not None:
            os.close(reader)
            reader = None

    with pytest.raises(BrokenPipeError, match="pipe") as caught:
        csd.generate(e, PROMPTS, record=str(pipe), callback=leave, **OPTIONS)
    assert [out.tokens for out in caught.value.samples] == expected


def test_a_recording_without_samples_replaces_none(e, tmp_path):
    # no sample ends in the first step
    path, options = tmp_path / "t.jsonl", OPTIONS | dict(stop_token_ids=[], ignore_eos=True)
    csd.generate(e, PROMPTS, record=str(path), **options)
    before = path.read_bytes()

    def interrupt(*args):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        csd.generate(e, PROMPTS, record=str(path), callback=interrupt, **options)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["t.jsonl"]


def test_a_recording_that_is_zipped_by_its_name(e, expected, tmp_path):
    path = tmp_path / "t.jsonl.gz"
    csd.generate(e, PROMPTS, record=str(path), **OPTIONS)
    assert path.read_bytes()[:2] == b"\x1f\x8b"
    assert [t.samples for t in read_traces(path)] == expected


def test_a_resumed_file_that_is_removed(tmp_path):
    path, settings, rows = tmp_path / "out.jsonl", {"a": 1}, [{"n": i} for i in range(4)]
    file = ResumedFile(path, settings, lambda i, row: None, "file")
    for i, row in enumerate(rows):
        if i == 2:
            path.unlink()
        if i == 3:
            path.write_bytes(b"")
        file.add([row])
    file.close()
    again = ResumedFile(path, settings, lambda i, row: None, "file")
    assert again.rows == rows
    (tmp_path / "other").write_text("a note\n")
    os.replace(tmp_path / "other", path)
    with pytest.raises(ValueError, match="has been replaced by another file"):
        again.add(rows)
    again.close()
    assert path.read_text() == "a note\n"
