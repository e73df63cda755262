"""Runs that are killed at random moments, and go on: the files are those of a run that was not."""

import json
import os
import random
import time

import pytest
import torch
from faults import killed, moment, times

import csd
from csd.cli.main import main
from csd.evaluate.resumable_results import ResumedFile
from csd.traces.traces import Trace, read_traces, write_traces

PROMPTS = 8


@pytest.fixture(scope="module")
def place(tmp_path_factory, toy_folder):
    """A folder with a file of problems, and what runs that nothing stops make of it."""
    folder = tmp_path_factory.mktemp("kills")
    rows = [{"prompt": f"Say {i % 7}.", "answer": str(i)} for i in range(PROMPTS)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    for kind in COMMANDS:
        # the first call also makes the model's engine, which children inherit
        assert main(command(kind, folder, toy_folder, "whole")) == 0
        begun = time.monotonic()
        assert main(command(kind, folder, toy_folder, "timed")) == 0
        TAKES[kind] = time.monotonic() - begun
    yield folder
    csd.release()


# seconds of a run that nothing stops
TAKES: dict[str, float] = {}
COMMANDS = {
    "eval": ["eval", "{problems}", "--model", "{model}", "--quiet", "-o", "{out}"],
    "record": ["record", "{model}", "{problems}", "-o", "{out}"],
}


def command(kind, folder, model, out) -> list[str]:
    places = dict(problems=folder / "problems.jsonl", model=model, out=folder / f"{kind}-{out}")
    more = ["-n", "3", "--max-new-tokens", "12", "--budget", "4", "--temperature", "0.8"]
    return [part.format(**places) for part in COMMANDS[kind]] + more


def rows(path) -> list[dict]:
    """Lines of a file, without figures that may differ."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in r.items() if k not in ("seconds", "steps", "top")} for r in found]


def probabilities(path) -> torch.Tensor:
    """The target's, of a trace file: a float32 model's, so that they depend on what else a step
    had in it."""
    tops = [json.loads(line).get("top", []) for line in path.read_text().splitlines()]
    return torch.tensor([p for top in tops for s in top for _, probs in s for p in probs])


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_run_that_is_killed_goes_on(place, toy_folder, kind):
    rng = random.Random(kind)
    whole = rows(place / f"{kind}-whole")
    kills = 0
    for i in times(1, 50):
        out = place / f"{kind}-{i}"
        arguments = command(kind, place, toy_folder, str(i))
        # killed up to three times, at a moment of the time that it takes
        for _ in range(rng.randrange(1, 4)):
            if out.exists() and kind == "record":
                break
            kills += killed(lambda a=arguments: main(a), moment(rng, TAKES[kind]))
        if kind == "eval" or not out.exists():
            assert main(arguments) == 0
        assert rows(out) == whole
        # an exponential of logits below 100 with errors of a few units in their last place
        eps = 100 * 8 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(
            probabilities(out), probabilities(place / f"{kind}-whole"), rtol=eps, atol=eps
        )
        # a kill between the last two acts leaves the part beside the whole
        left = {p.suffix for p in place.glob(f"{kind}-{i}.*")}
        assert left <= {".json", ".part"}
    assert kills


def test_a_history_that_is_killed_while_it_saves(tmp_path):
    """Each of two prompts has its newest additions in order; at most the last one is lost."""
    path, marker = tmp_path / "h.jsonl", tmp_path / "said"
    rng = random.Random(0)
    count = kills = 0

    def work():
        # a line is a few writes of a page; every tenth addition or so has the file rewritten
        with csd.History(samples=2, tokens=2000, path=path) as h, open(marker, "wb", 0) as file:
            for i in range(count, count + 400):
                h.add([i % 2], [[i] * 400])
                file.write(b"%d\n" % i)

    for _ in times(3, 50):
        marker.write_bytes(b"")
        kills += killed(work, moment(rng, 0.4))
        last = max([count - 1, *map(int, marker.read_bytes().split())])
        with csd.History(samples=2, tokens=2000, path=path) as h:
            held = [[e.tokens.tolist() for e in h.of([p])] for p in range(2)]
        newest = max((t for p in held for s in p for t in s), default=-1)
        # what the child had added and could not say any more
        assert newest in (last, last + 1)
        count = newest + 1
        for p, samples in enumerate(held):
            want = [i for i in range(newest, -1, -1) if i % 2 == p][:2]
            assert samples == [[i] * 400 for i in want]
    assert kills


def test_two_processes_on_one_file(tmp_path):
    """The second one fails and says why; the first one's file stays as it is."""
    path = tmp_path / "out.jsonl"
    holder = ResumedFile(path, {"a": 1}, lambda i, row: None, "file")
    holder.add([{"problem": 0}])
    before = path.read_bytes()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ResumedFile(path, {"a": 1}, lambda i, row: None, "file")
        except ValueError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1000).decode() == f"{path} is being written by another process"
    os.close(read)
    os.close(write)
    assert path.read_bytes() == before
    holder.close()
    ResumedFile(path, {"a": 1}, lambda i, row: None, "file").close()


def test_two_processes_that_write_one_trace_file(tmp_path):
    path, trace = tmp_path / "t.jsonl", Trace(0, [1], [[2]], 1.0, None)

    def while_written():
        with pytest.raises(ValueError, match=f"{path} is being written by another process"):
            write_traces(path, [trace])
        yield trace

    write_traces(path, while_written())
    assert list(read_traces(path)) == [trace]
    assert [p.name for p in tmp_path.iterdir()] == ["t.jsonl"]


def test_a_recording_that_is_held(place, toy_folder, capsys):
    arguments = command("record", place, toy_folder, "held")
    part = ResumedFile(place / "record-held.part", {}, lambda i, row: None, "file")
    assert main(arguments) == 2
    assert "record-held.part is being written by another process" in capsys.readouterr().err
    part.close()
