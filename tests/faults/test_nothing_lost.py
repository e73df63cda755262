"""Samples are kept however a call ends: written, returned, or in the error."""

import json
import os
import resource
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from faults import assert_usable
from scripted import Letters, PrefixSum, engine

import csd
from csd.cli.main import main
from csd.engine.traces.traces import read_traces
from csd.evaluate.resumed import ResumedFile
from csd.integrations.groups import draw

PROMPTS = ["abcabc", "hello"]
OPTIONS = dict(num_samples=3, max_new_tokens=8, seed=4, budget=8, stop_token_ids=[3])


@pytest.fixture(scope="module")
def e():
    return engine(PrefixSum(sharpness=8.0), Letters(), max_slots=2, prefill_chunk=4)


@pytest.fixture(scope="module")
def expected(e):
    return [out.tokens for out in csd.generate(e, PROMPTS, **OPTIONS)]


@pytest.fixture
def files_of_any_size():
    """Undo what `fill` has changed."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill(folder):
    """From now on files grow to a few bytes only, as on a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))


def check_beginnings(samples, expected):
    """All that was drawn, and nothing else; at least a token of it."""
    assert isinstance(samples, list) and len(samples) == len(expected)
    for out, whole in zip(samples, expected, strict=True):
        assert isinstance(out, csd.Samples) and len(out) == len(whole)
        for sample, tokens in zip(out, whole, strict=True):
            assert sample.tokens == tokens[: len(sample.tokens)]
            assert sample.finish_reason == "cancelled" or sample.tokens == tokens
    assert any(sample.tokens for out in samples for sample in out)


class Never:
    """A callback under which no step may run."""

    def __call__(self, *args):
        raise AssertionError("a step has run")


@pytest.fixture
def unwritable(tmp_path):
    """Paths that cannot be written, though the folder can: by what is there."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "part.new").mkdir()
    return {
        "full": "/dev/full", "folder": tmp_path / "folder", "part": tmp_path / "part",
    }  # fmt: skip


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
        with pytest.raises(ValueError, match="record must be another file than those of history"):
            csd.generate(e, PROMPTS, history=history, **options)
        # whoever has it open
        if name in ("h.jsonl", "link.jsonl"):
            with pytest.raises(ValueError, match=f"{name} is open as a History"):
                csd.generate(e, PROMPTS, **options)
    csd.generate(e, PROMPTS, record=str(tmp_path / name), **OPTIONS)
    assert len(list(read_traces(tmp_path / name))) == 2


ACCIDENTS = {"full": fill, "folder removed": shutil.rmtree}


@pytest.mark.parametrize("accident", ACCIDENTS)
@pytest.mark.parametrize("end", ["record", "history", "both"])
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[0]], ids=["list", "one"])
def test_unwritable_results_are_in_the_error(
    e, expected, tmp_path, files_of_any_size, accident, end, prompts
):
    (tmp_path / "to").mkdir()
    (tmp_path / "kept").mkdir()
    whole = isinstance(prompts, list)
    places = {name: tmp_path / "to" / f"{name}.jsonl" for name in ("record", "history")}
    if end != "both":
        other = {"record": "history", "history": "record"}[end]
        places[other] = tmp_path / "kept" / f"{other}.jsonl"
    done = []

    def strike(*args):
        if not done:
            done.append(ACCIDENTS[accident](tmp_path / "to"))

    with (
        csd.History(path=places["history"], top=True) as history,
        pytest.raises(OSError, match=str(tmp_path)) as caught,
    ):
        csd.generate(
            e, prompts, history=history, record=str(places["record"]), callback=strike, **OPTIONS
        )
    samples = caught.value.samples
    assert [s.tokens for s in samples] == expected if whole else samples.tokens == expected[0]
    assert "cancelled" not in (samples[0] if whole else samples).finish_reasons
    # the one that fails takes nothing from the other
    for place in places.values():
        if place.parent.name == "kept" and accident == "folder removed":
            assert [t.samples for t in read_traces(place)] == expected[: 2 if whole else 1]
    assert [out.tokens for out in csd.generate(e, PROMPTS, **OPTIONS)] == expected


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


@dataclass(frozen=True)
class Frozen(Exception):
    at: int = 0


@pytest.mark.parametrize("error", [ValueError, Frozen, SystemExit], ids=lambda e: e.__name__)
@pytest.mark.parametrize("what", ["callback", "until", "progress", "decode"])
def test_callback_errors_carry_the_samples(e, expected, tmp_path, monkeypatch, what, error):
    calls = []

    def fail(*args, **kwargs):
        calls.append(args)
        if len(calls) > 2:
            raise error
        return False

    record = str(tmp_path / "t.jsonl")
    more = {what: fail} if what in ("callback", "until") else {}
    if what == "progress":
        monkeypatch.setattr("csd.engine.progress.Progress.show", fail)
        more = dict(progress=True)
    if what == "decode":
        tokenizer = Letters()
        decode = tokenizer.decode
        tokenizer.decode = lambda *args, **kwargs: fail() or decode(*args, **kwargs)
        more = dict(tokenizer=tokenizer)
    with pytest.raises(error) as caught:
        csd.generate(e, PROMPTS, record=record, **more, **OPTIONS)
    check_beginnings(caught.value.samples, expected)
    finished = [s for out in caught.value.samples for s in out if s.finish_reason != "cancelled"]
    written = [s for t in read_traces(record) for s in t.samples] if finished else []
    assert written == [s.tokens for s in finished]
    calls.clear()
    with pytest.raises(error) as caught:
        csd.generate(e, PROMPTS[0], **more, **OPTIONS)
    assert isinstance(caught.value.samples, csd.Samples)
    calls.clear()
    with pytest.raises(error) as caught:
        for _ in csd.stream(e, PROMPTS, **more, **OPTIONS):
            pass
    check_beginnings(caught.value.samples, expected)
    assert_usable(e, PROMPTS[1], expected[1], **OPTIONS)


def test_a_tokenizer_that_fails_after_an_interrupt(e, expected):
    """The texts of unfinished samples are made last of all."""

    tokenizer = Letters()

    def fail(*args, **kwargs):
        raise RuntimeError("no words")

    def interrupt(*args):
        tokenizer.decode = fail
        raise KeyboardInterrupt

    with pytest.raises(RuntimeError, match="no words") as caught:
        csd.generate(e, PROMPTS, tokenizer=tokenizer, callback=interrupt, **OPTIONS)
    check_beginnings(caught.value.samples, expected)


def test_a_recording_without_samples_replaces_none(e, tmp_path):
    path = tmp_path / "t.jsonl"
    csd.generate(e, PROMPTS, record=str(path), **OPTIONS)
    before = path.read_bytes()

    def interrupt(*args):
        raise KeyboardInterrupt

    csd.generate(e, PROMPTS, record=str(path), callback=interrupt, **OPTIONS)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["t.jsonl"]


def test_a_recording_that_is_zipped_by_its_name(e, expected, tmp_path):
    path = tmp_path / "t.jsonl.gz"
    csd.generate(e, PROMPTS, record=str(path), **OPTIONS)
    assert path.read_bytes()[:2] == b"\x1f\x8b"
    assert [t.samples for t in read_traces(path)] == expected


def test_integrations_carry_samples_too(e, expected, tmp_path):
    params = e.prepare(PROMPTS, **OPTIONS).requests[0].params
    groups = [([ord(c) - ord("a") + 4 for c in p], params, range(3)) for p in PROMPTS]
    calls = []

    def fail(*args):
        calls.append(args)
        if len(calls) > 6:
            raise ValueError

    with csd.History(path=tmp_path / "h.jsonl") as history, pytest.raises(ValueError) as caught:
        draw(e, groups, seed=4, history=history, on_tokens=fail)
    finished = [s for out in caught.value.samples for s in out if s.finish_reason != "cancelled"]
    assert any(s.tokens for out in caught.value.samples for s in out)
    kept = [s for t in read_traces(tmp_path / "h.jsonl") for s in t.samples]
    assert kept == [s.tokens for s in finished]


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


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    path = tmp_path_factory.mktemp("lost") / "problems.jsonl"
    rows = [{"prompt": f"Say {i}.", "answer": str(i)} for i in range(4)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    yield path
    csd.release()


DRAWN = ["-n", "2", "--max-new-tokens", "4", "--budget", "4"]


def test_whole_problems_of_a_block_that_fails_are_kept(problems, toy_folder, tmp_path, monkeypatch):
    out, history = tmp_path / "out.jsonl", tmp_path / "h.jsonl"
    command = ["eval", str(problems), "--model", toy_folder, "--quiet", "--batch", "4", *DRAWN]
    monkeypatch.setattr(csd.History, "add", lambda *args, **kwargs: 1 / 0)
    assert main([*command, "-o", str(out), "--history", str(history)]) == 2
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["problem"] for r in rows[1:]] == [0, 1, 2, 3]


@pytest.mark.parametrize("blocked", ["out", "summary"])
def test_eval_tries_its_files_before_it_draws(problems, toy_folder, tmp_path, capsys, blocked):
    out = tmp_path / "out.jsonl"
    where = Path("/dev/full") if blocked == "out" else out
    (tmp_path / "out.summary.json").mkdir()
    command = ["eval", str(problems), "--model", toy_folder, "--quiet", *DRAWN, "-o", str(where)]
    assert main(command) == 2
    named = {"out": "/dev/full", "summary": "out.summary.json"}[blocked]
    assert named in capsys.readouterr().err
    assert not out.exists() or len(out.read_text().splitlines()) == 1


def test_record_tries_its_file_before_it_draws(problems, toy_folder, tmp_path, capsys):
    (tmp_path / "t.jsonl.new").mkdir()
    out = tmp_path / "t.jsonl"
    assert main(["record", toy_folder, str(problems), "-o", str(out), *DRAWN]) == 2
    assert "t.jsonl" in capsys.readouterr().err
    assert not out.exists() and len((tmp_path / "t.jsonl.part").read_text().splitlines()) == 1


def sampled(folder, toy_folder, stdout, *more, before=lambda: None):
    """Exit status and errors of `csd sample` in a process of its own, writing to a file number.

    None is a standard output that is closed."""
    errors = folder / "stderr"
    child = os.fork()
    if child == 0:
        status = 70
        try:
            os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY), 2)
            sys.stderr = os.fdopen(2, "w", buffering=1)
            sys.stdout = None
            if stdout is not None:
                os.dup2(stdout, 1)
                sys.stdout = os.fdopen(1, "w")
            tempfile.tempdir = str(folder)
            before()
            status = main(["sample", toy_folder, "Say 1.", *DRAWN, "--seed", "1", *more])
            if stdout is not None:
                # as at an interpreter's end
                sys.stdout.flush()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), errors.read_text()


@pytest.fixture(scope="module")
def drawn(toy_folder):
    """Samples of the command; they make its engine, which children inherit."""
    message = [{"role": "user", "content": "Say 1."}]
    yield csd.generate(toy_folder, message, num_samples=2, max_new_tokens=4, budget=4, seed=1)
    csd.release()


@pytest.fixture(scope="module")
def texts(drawn):
    return drawn.texts


def never(monkeypatch):
    return lambda: monkeypatch.setattr(csd.Engine, "generate", Never())


@pytest.mark.parametrize("kind", ["full", "closed pipe", "closed"])
@pytest.mark.parametrize("form", [(), ("--json",)], ids=["text", "json"])
def test_output_is_tried_before_the_first_step(
    tmp_path, toy_folder, texts, monkeypatch, kind, form
):
    stdout = {"full": full, "closed pipe": without_reader, "closed": lambda: None}[kind]()
    code, error = sampled(tmp_path, toy_folder, stdout, *form, before=never(monkeypatch))
    assert code == 2
    assert "standard output" in error and "Traceback" not in error
    assert [p.name for p in tmp_path.iterdir()] == ["stderr"]


def full():
    return os.open("/dev/full", os.O_WRONLY)


def without_reader():
    read, write = os.pipe()
    os.close(read)
    return write


@pytest.mark.parametrize("broken", [full, without_reader], ids=["full", "closed pipe"])
@pytest.mark.parametrize("form", [(), ("--json",)], ids=["text", "json"])
def test_unprintable_output_goes_to_a_file(tmp_path, toy_folder, drawn, monkeypatch, broken, form):
    def then_break(*args, **kwargs):
        os.dup2(broken(), 1)
        # as the parent has drawn: its threads, which a child lacks, may have held locks
        return drawn

    code, error = sampled(
        tmp_path, toy_folder, os.open(tmp_path / "out", os.O_CREAT | os.O_WRONLY), *form,
        before=lambda: monkeypatch.setattr(csd.Engine, "generate", then_break),
    )  # fmt: skip
    assert code == 2 and "Traceback" not in error
    (kept,) = tmp_path.glob("csd-*")
    assert str(kept) in error
    found = kept.read_text()
    if form:
        assert json.loads(found)["texts"] == drawn.texts
    else:
        assert all(text in found for text in drawn.texts)


def test_samples_are_printed_before_the_error_of_a_file(
    tmp_path, toy_folder, texts, monkeypatch, capsys
):
    record = tmp_path / "to" / "t.jsonl"
    record.parent.mkdir()
    write = csd.engine.call.write_traces

    def removed(*args):
        shutil.rmtree(record.parent)
        write(*args)

    monkeypatch.setattr("csd.engine.call.write_traces", removed)
    command = ["sample", toy_folder, "Say 1.", *DRAWN, "--seed", "1", "--json"]
    assert main([*command, "--record", str(record)]) == 2
    streams = capsys.readouterr()
    assert json.loads(streams.out)["texts"] == texts and str(record) in streams.err


def test_a_tokenizer_that_has_no_pieces(tmp_path, toy_folder, texts, monkeypatch, capsys):
    def fail(*args):
        raise ValueError("no pieces")

    monkeypatch.setattr("csd.engine.result_json.pieces", fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["sample", toy_folder, "Say 1.", *DRAWN, "--seed", "1", "--json"]) == 2
    (kept,) = tmp_path.glob("csd-*")
    assert str(kept) in capsys.readouterr().err
    assert json.loads(kept.read_text())["texts"] == texts


def test_a_report_replaces_nothing_but_its_page(tmp_path, toy_folder, texts, capsys):
    command = ["sample", toy_folder, "Say 1.", *DRAWN, "--json", "--drafts"]
    assert main(command) == 0
    drawn = tmp_path / "out.json"
    drawn.write_text(capsys.readouterr().out)
    before = drawn.read_bytes()
    (tmp_path / "link.html").symlink_to(drawn)
    for out in (drawn, tmp_path / "link.html"):
        assert main(["report", str(drawn), "-o", str(out)]) == 2
        assert "out must be another file" in capsys.readouterr().err
    assert drawn.read_bytes() == before
    assert main(["report", str(drawn), "-o", "/dev/full"]) == 2
    assert "/dev/full" in capsys.readouterr().err
