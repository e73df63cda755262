"""Output of commands: tried before the first step, and kept in a file where it breaks later."""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from faults import Never

import csd
from csd.cli.main import main


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
    return lambda: monkeypatch.setattr(csd.Engine, "samples", Never())


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
        # as the parent has drawn: its threads, which a child lacks, may have held locks
        for sample in drawn:
            os.dup2(broken(), 1)
            yield 0, sample

    def without_steps():
        monkeypatch.setattr(csd.Engine, "samples", then_break)
        monkeypatch.setattr(csd.engine.call.Call, "results", lambda call: [drawn])

    code, error = sampled(
        tmp_path,
        toy_folder,
        os.open(tmp_path / "out", os.O_CREAT | os.O_WRONLY),
        *form,
        before=without_steps,
    )
    assert code == 2 and "Traceback" not in error
    (kept,) = tmp_path.glob("csd-*")
    assert str(kept) in error
    found = kept.read_text()
    if form:
        assert json.loads(found)["texts"] == drawn.texts
    else:
        assert all(text in found for text in drawn.texts) and str(drawn.stats) in found


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

    monkeypatch.setattr("csd.engine.results.result.pieces", fail)
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
        assert "out must differ from the input file" in capsys.readouterr().err
    assert drawn.read_bytes() == before
    assert main(["report", str(drawn), "-o", "/dev/full"]) == 2
    assert "/dev/full" in capsys.readouterr().err
