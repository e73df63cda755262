"""`csd.History` in memory and on disk."""

import json
import os
import signal
from contextlib import contextmanager

import pytest

import csd
from csd.traces.traces import Trace, read_traces, write_traces

TOP = [[[5, 7], [0.5, 0.25]], [[6], [1.0]]]


@contextmanager
def forked(function):
    """A forked process that writes what `function` yields, or its error; its id and its output."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        # a child never goes on with the tests
        try:
            os.close(reading)
            try:
                for x in function():
                    os.write(writing, f"{x}\n".encode())
            except BaseException as error:
                os.write(writing, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        with open(reading) as output:
            yield process, output
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def held(h, prompt):
    return [e.tokens.tolist() for e in h.of(prompt)]


def test_the_newest_samples_stay():
    h = csd.History(samples=3)
    h.add([1], [[1], [2]])
    h.add([1], [[3], [4]])
    assert held(h, [1]) == [[4], [3], [2]]
    assert [e.age for e in h.of([1])] == [0, 0, 1]
    h.add([1], [[5], [6], [7], [8]])
    assert held(h, [1]) == [[8], [7], [6]]


def test_epochs_bound_the_additions():
    h = csd.History(samples=99, epochs=2)
    for i in range(4):
        h.add([1], [[i], [i]])
    assert held(h, [1]) == [[3], [3], [2], [2]]


def test_the_prompt_used_longest_ago_is_dropped_first():
    h = csd.History(tokens=12)
    for p in (1, 2, 3):
        h.add([p], [[9, 9, 9]])
    assert h.size == 12
    h.of([1])
    h.add([4], [[9, 9, 9]])
    assert [p for p in (1, 2, 3, 4) if [p] in h] == [1, 3, 4]
    # a prompt alone loses its oldest samples, and one sample too large is not kept
    h.add([5], [[1] * 4, [2] * 4, [3] * 4])
    assert len(h) == 1 and held(h, [5]) == [[3] * 4, [2] * 4]
    h.add([6], [[1] * 12])
    assert len(h) == 0 and h.size == 0


def test_memory_is_bounded():
    h = csd.History(samples=4, tokens=5000)
    for i in range(300):
        h.add([i % 50, 7], [[i % 9] * (i % 130)] * (i % 6))
        assert h.size <= 5000
        assert h.nbytes == 4 * h.size
        assert len(h.of([i % 50, 7])) <= 4
    top = csd.History(tokens=5000, top=True)
    for i in range(50):
        top.add([i], [[1] * 40] * 8, [[[[1], [1.0]]] * 40] * 8)
    # 52 bytes a token, 4 of a prompt's
    assert top.nbytes <= 52 * 5000 and top.size <= 5000


@pytest.mark.parametrize("field", ["samples", "tokens", "epochs"])
def test_bad_sizes(field):
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        csd.History(**{field: 0})


def test_files_hold_added_samples(tmp_path):
    path = tmp_path / "h.jsonl"
    with csd.History(path=path, top=True) as h:
        h.add([1, 2], [[5, 6]], [TOP], temperature=0.7, seed=3, indices=[4], stop_ids=[9])
        h.add([3], [[8]])
        h.add([1, 2], [[7]])
    with csd.History(path=path, top=True) as h:
        assert held(h, [1, 2]) == [[7], [5, 6]] and held(h, [3]) == [[8]]
        assert [e.age for e in h.of([1, 2])] == [0, 1]
        ids, probs = h.of([1, 2])[1].top
        assert ids[:, :2].tolist() == [[5, 7], [6, -1]]
        assert probs[:, :2].tolist() == [[0.5, 0.25], [1, 0]]
    first = next(read_traces(path))
    assert (first.temperature, first.seed, first.indices, first.stop_ids) == (0.7, 3, [4], (9,))
    with csd.History(path=path) as h:
        assert h.of([1, 2])[1].top is None


def test_a_recording_is_a_history(tmp_path):
    path = tmp_path / "t.jsonl"
    write_traces(path, [Trace(0, [1, 2], [[5, 6], [5]], 0.7, [TOP, TOP[:1]])])
    with csd.History(path=path, top=True) as h:
        assert held(h, [1, 2]) == [[5], [5, 6]] and h.of([1, 2])[0].top is not None
        h.add([1, 2], [[4]])
    assert [t.samples for t in read_traces(path)] == [[[5, 6], [5]], [[4]]]


def test_a_file_without_a_last_newline_is_not_run_together(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt_ids": [1], "samples": [[2]]}')
    with csd.History(path=path) as h:
        h.add([1], [[3]])
    with csd.History(path=path) as h:
        assert held(h, [1]) == [[3], [2]]


def test_the_file_is_rewritten_when_most_of_it_is_dropped(tmp_path):
    path = tmp_path / "h.jsonl"
    with csd.History(samples=2, tokens=100, path=path, top=True) as h:
        for i in range(60):
            h.add([i % 3], [[i] * 5], [[[[i, 1], [0.75, 0.1]]] * 5])
        want = {p: (held(h, [p]), [e.top[1].tolist() for e in h.of([p])]) for p in range(3)}
    assert len(path.read_text().splitlines()) < 30
    with csd.History(samples=2, tokens=100, path=path, top=True) as h:
        got = {p: (held(h, [p]), [e.top[1].tolist() for e in h.of([p])]) for p in range(3)}
    assert got == want
    assert {p.name for p in tmp_path.iterdir()} == {"h.jsonl", "h.jsonl.lock"}


GOOD = '{"prompt_ids": [1], "samples": [[2, 3]]}\n'
FIRST = r"must have .* as 'samples\[0\]"
BAD = {
    "truncated": (GOOD + GOOD[:20], 2, "ends within it"),
    "not JSON": (GOOD + "hello\n" + GOOD, 2, "the trace"),
    "another object": (GOOD + '{"question": 3}\n', 2, "the trace must have"),
    "a list": ("[1]\n", 1, "the trace must be"),
    "text for ids": ('{"prompt_ids": "ab", "samples": [[1]]}\n', 1, "must have .* as 'prompt_ids'"),
    "samples not nested": ('{"prompt_ids": [1], "samples": [1]}\n', 1, FIRST),
    "negative": ('{"prompt_ids": [1], "samples": [[-1]]}\n', 1, FIRST),
    "true": ('{"prompt_ids": [1], "samples": [[true]]}\n', 1, FIRST),
    "top too short": (GOOD + GOOD[:-2] + ', "top": [[[[1], [1.0]]]]}\n', 2, "'top' must have"),
    "top of text": (GOOD + GOOD[:-2] + ', "top": [["a", "b"]]}\n', 2, "as 'top"),
}


@pytest.mark.parametrize(("text", "line", "message"), BAD.values(), ids=BAD)
def test_a_file_that_is_none_is_an_error_that_names_the_line(tmp_path, text, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"bad\.jsonl, line {line}\b.*{message}"):
        csd.History(path=path)
    assert path.read_text() == text
    # and it is not left locked
    path.write_text(GOOD)
    csd.History(path=path).close()


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\x80\x00\xff" * 20)
    with pytest.raises(ValueError, match="line 1: 'utf-8' codec can't decode"):
        csd.History(path=path)
    with pytest.raises(ValueError, match="without gzip compression"):
        csd.History(path=tmp_path / "a.jsonl.gz")


def test_one_history_at_a_time_has_a_file_open(tmp_path):
    path = tmp_path / "h.jsonl"
    h = csd.History(path=path)
    with pytest.raises(ValueError, match="is open in another History or process"):
        csd.History(path=path)
    with forked(lambda: csd.History(path=path)) as (_, output):
        assert "is open in another History or process" in output.read()
    h.close()
    h.close()
    with pytest.raises(ValueError, match="is closed"):
        h.add([1], [[1]])
    with pytest.raises(ValueError, match="history is closed"):
        csd.generate("no model", "a", history=h)
    csd.History(path=path).close()


@pytest.mark.parametrize("at", ["line", "mark"])
def test_killed_at_every_byte_of_an_addition(tmp_path, monkeypatch, at):
    """Earlier lines are there whatever part of an addition was written."""
    path, lock = tmp_path / "h.jsonl", tmp_path / "h.jsonl.lock"
    with csd.History(path=path) as h:
        h.add([1], [[2, 3]])
    before = path.read_bytes()
    line = json.dumps({"prompt_ids": [1], "samples": [[4]]}).encode() + b"\n"
    mark = str(len(before)).encode()
    cuts = range(len(line) + 1) if at == "line" else range(len(mark))
    for cut in cuts:
        path.write_bytes(before + (line[:cut] if at == "line" else b""))
        lock.write_bytes(mark if at == "line" else mark[:cut])
        with csd.History(path=path) as h:
            whole = at == "line" and cut == len(line)
            assert held(h, [1]) == [[4], [2, 3]][not whole :]
            h.add([1], [[9]])
        with csd.History(path=path) as h:
            assert held(h, [1])[0] == [9]


def test_killed_while_saving(tmp_path):
    """A process that only adds is killed at some moment; at most its last addition is lost."""
    path = tmp_path / "h.jsonl"

    def add():
        with csd.History(samples=3, tokens=3000, path=path) as h:
            for i in range(10**9):
                h.add([i % 5], [[i] * 200])
                yield i

    for added in (3, 40):
        with forked(add) as (process, output):
            last = -1
            while last < added:
                last = int(output.readline())
            os.kill(process, signal.SIGKILL)
            # what it printed before it was killed
            last = max([last, *map(int, output.read().split())])
        with csd.History(samples=3, tokens=3000, path=path) as h:
            newest = max(t for p in range(5) for s in held(h, [p]) for t in s)
            assert newest in (last, last + 1)
            assert all(len(s) == 200 for p in range(5) for s in held(h, [p]))
        path.unlink()


def test_an_addition_that_cannot_be_written_leaves_the_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "h.jsonl"
    with csd.History(path=path) as h:
        h.add([1], [[2]])

        def full(file, data):
            os.write(file, data[:9])
            raise OSError("no space left")

        with monkeypatch.context() as patch:
            patch.setattr("csd.traces.journal._write", full)
            with pytest.raises(OSError, match="no space left"):
                h.add([1], [[3]])
        h.add([1], [[4]])
        assert held(h, [1]) == [[4], [2]]
    with csd.History(path=path) as h:
        assert held(h, [1]) == [[4], [2]]
