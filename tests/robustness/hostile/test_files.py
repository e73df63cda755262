"""Files that are not what their readers expect: an error that names the file and the line."""

import gzip
import json
import random
import re

import pytest

from csd.cli.main import main
from csd.evaluate.problems.tasks import TASKS, read
from csd.evaluate.resumable_results import ResumedFile
from csd.research.baselines.rest import Datastore
from csd.traces.traces import Trace, read_traces, write_traces
from csd.utils import files as schema

GOOD = {"prompt_ids": [1, 2], "samples": [[3, 4, 5]]}
DEEP = "[" * 100_000
# a line, and what is said of it
LINES = [
    ("[1]", r"must be an object, got \[1\]"),
    ("5", "must be an object, got 5"),
    ("null", "must be an object, got None"),
    ('"a"', "must be an object, got 'a'"),
    ("{", "is not JSON"),
    (DEEP, "at most 64 levels of nested lists and objects"),
    ('{"a": ' * 100_000, "at most 64 levels of nested lists and objects"),
    ('{"a": NaN}', "NaN is not a number"),
    ('{"a": %s}' % ("1" * 5000), "is not JSON"),
]
TRACES = [
    *LINES,
    ('{"samples": [[1]]}', "must have 'prompt_ids'"),
    ('{"prompt_ids": [1]}', "must have 'samples'"),
    ('{"prompt_ids": [], "samples": [[1]]}', "a list of at least 1 as 'prompt_ids'"),
    ('{"prompt_ids": [1], "samples": []}', "a list of at least 1 as 'samples'"),
    ('{"prompt_ids": [1], "samples": [[2], []]}', r"a list of at least 1 as 'samples\[1\]'"),
    ('{"prompt_ids": [1], "samples": [[2, -1]]}', r"2147483647 as 'samples\[0\]\[1\]', got -1"),
    ('{"prompt_ids": [1], "samples": [[2, true]]}', r"as 'samples\[0\]\[1\]', got True"),
    ('{"prompt_ids": [1], "samples": [[2147483648]]}', "got 2147483648"),
    ('{"prompt_ids": [1], "samples": [[2]], "temperature": -1}', "as 'temperature', got -1"),
    ('{"prompt_ids": [1], "samples": [[2]], "temperature": 1e999}', "as 'temperature', got inf"),
    ('{"prompt_ids": [1], "samples": [[2]], "indices": [0, 1]}', "1 entries in 'indices', got 2"),
    ('{"prompt_ids": [1], "samples": [[2]], "top": [[[[1, 2], [0.5]]]]}', "per token in 'top'"),
    ('{"prompt_ids": [1], "samples": [[2]], "top": [[[[1]]]]}', r"list of 2 as 'top\[0\]\[0\]'"),
    ('{"prompt_ids": [1], "samples": [[2]], "problem": "\\ud800"}', "as 'problem'"),
]


@pytest.mark.parametrize(("line", "message"), TRACES, ids=range(len(TRACES)))
def test_traces(tmp_path, capsys, line, message):
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + line + "\n")
    with pytest.raises(ValueError, match=f"{path}, line 3 .*{message}"):
        list(read_traces(path))
    assert main(["replay", str(path)]) == 2
    assert f"csd: {path}, line 3 " in capsys.readouterr().err


STORES = [*LINES, ('{"a": 1}', "must have 'samples'"), ('{"samples": [[-1]]}', "got -1")]


@pytest.mark.parametrize(("line", "message"), STORES, ids=range(len(STORES)))
def test_traces_as_a_datastore(tmp_path, line, message):
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=f"{path}, line 2 .*{message}"):
        Datastore.load(path)


def test_a_line_that_is_too_long_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(schema, "MAX_LINE", 1 << 20)
    path = tmp_path / "traces.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + b" " * (3 << 20))
    with pytest.raises(ValueError, match=f"{path}, line 2 must have at most 1 MiB"):
        list(read_traces(path))
    # 64 MiB of zeros in 64 KiB
    packed = tmp_path / "traces.jsonl.gz"
    packed.write_bytes(gzip.compress(b"0" * (64 << 20)))
    with pytest.raises(ValueError, match=f"{packed}, line 1 must have at most 1 MiB"):
        list(read_traces(packed))


@pytest.mark.parametrize("damage", ["torn", "corrupt", "no gzip"])
def test_a_damaged_gzip(tmp_path, capsys, damage):
    path = tmp_path / "traces.jsonl.gz"
    rows = [GOOD | {"problem": str(random.Random(i).random())} for i in range(2000)]
    data = bytearray(gzip.compress("".join(json.dumps(r) + "\n" for r in rows).encode()))
    if damage == "torn":
        data = data[: len(data) // 2]
    elif damage == "corrupt":
        data[len(data) // 2 : len(data) // 2 + 40] = b"\xff" * 40
    else:
        data = bytearray(b"plain text")
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"{path}, line \d+ "):
        list(read_traces(path))
    assert main(["replay", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_a_recording_without_samples_has_no_line(tmp_path):
    """An interrupted call leaves such a recording."""
    path = tmp_path / "traces.jsonl"
    whole, none = Trace(0, [1], [[2]], 1.0, None), Trace(1, [3], [], 1.0, [])
    write_traces(path, [whole, none])
    assert list(read_traces(path)) == [whole]
    write_traces("/dev/null", [whole])
    assert not path.with_name("null").is_file()


def test_replays_that_would_not_end(tmp_path, capsys):
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps(GOOD) + "\n")
    assert main(["replay", str(path), "--nodes", "1000000"]) == 2
    assert "nodes must lie in [0, 63], got 1000000" in capsys.readouterr().err
    path.write_text(json.dumps(GOOD | {"samples": [[1] * 10**6]}) + "\n")
    assert main(["replay", str(path)]) == 2
    assert "samples of at most 131072 tokens" in capsys.readouterr().err


PROBLEMS = [
    *LINES,
    ('{"prompt": "a"}', "has no 'answer'"),
    ('{"prompt": "a", "answer": null}', "a string or a number as 'answer', got None"),
    ('{"prompt": "\\ud800", "answer": "b"}', "a string or messages as 'prompt'"),
    ('{"prompt": [{"content": "a"}], "answer": "b"}', r"'prompt' must have '\[0\].role'"),
    (
        '{"prompt": [{"role": "user"}], "answer": "b"}',
        r"'prompt' must have a string as '\[0\].conte",
    ),
    (
        '{"prompt": [{"role": 5, "content": "a"}], "answer": "b"}',
        r"a string as '\[0\].role', got 5",
    ),
]


@pytest.mark.parametrize(("line", "message"), PROBLEMS, ids=range(len(PROBLEMS)))
def test_problems_and_prompts(tmp_path, capsys, toy_folder, line, message):
    path, out = tmp_path / "problems.jsonl", tmp_path / "out.jsonl"
    path.write_text('{"prompt": "a", "answer": "1"}\n' + line + "\n")
    with pytest.raises(ValueError, match=f"{path}, line 2 .*{message}"):
        read(path, TASKS["jsonl"])
    assert main(["eval", str(path), "--model", toy_folder, "-o", str(out)]) == 2
    assert f"csd: {path}, line 2 " in capsys.readouterr().err
    if "answer" not in message:
        assert main(["record", toy_folder, str(path), "-o", str(out)]) == 2
        assert f"csd: {path}, line 2 " in capsys.readouterr().err
    assert not out.exists()


def test_a_prompt_of_many_megabytes(tmp_path, capsys, toy_folder):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"prompt": "a" * (8 << 20), "answer": "1"}))
    arguments = ["eval", str(path), "--model", toy_folder, "-o", str(tmp_path / "out.jsonl")]
    assert main(arguments) == 2
    assert "problem 0: prompt has 8388608 characters" in capsys.readouterr().err


ROW = dict(
    problem=0,
    answer="7",
    vote=None,
    vote_correct=False,
    answers=[None],
    correct=[False],
    finish_reasons=["stop"],
    texts=["a"],
    tokens=1,
    steps=1,
    seconds=0.5,
)


@pytest.mark.parametrize("key", ROW)
def test_results_whose_lines_lack_keys(tmp_path, key):
    from csd.evaluate.evaluation import Results

    path = tmp_path / "out.jsonl"
    for row, message in [
        ({k: v for k, v in ROW.items() if k != key}, "problem 0" if key == "problem" else key),
        (ROW | {key: {}}, "problem 0" if key == "problem" else key),
    ]:
        text = json.dumps({"settings": {}}) + "\n" + json.dumps(row) + "\n"
        path.write_text(text)
        with pytest.raises(ValueError, match=f"{path}, line 2 must .*{message}"):
            Results(path, {})
        assert path.read_text() == text


@pytest.mark.parametrize(("line", "message"), LINES, ids=range(len(LINES)))
def test_any_line_of_a_run(tmp_path, line, message):
    path = tmp_path / "out.jsonl"
    path.write_text('{"settings": {}}\n' + line + "\n")
    with pytest.raises(ValueError, match=f"{path}, line 2 "):
        ResumedFile(path, {}, lambda i, row: schema.check(row, dict), "file")


COSTS = [
    *LINES,
    ('{"rows": [1, 2]}', "must have 'seconds'"),
    ('{"rows": [1, 1], "seconds": [1, 2]}', "sizes must be ascending"),
    ('{"rows": [2, 1], "seconds": [1, 2]}', "sizes must be ascending"),
    ('{"rows": [1, 2], "seconds": [1]}', "at least 2 as 'seconds'"),
    ('{"rows": [1, 2], "seconds": [0, 0]}', "more than 0"),
    ('{"rows": [1, 2], "seconds": [1, 1e999]}', "got inf"),
    ('{"rows": [0, 2], "seconds": [1, 1]}', r"'rows\[0\]', got 0"),
]


@pytest.mark.parametrize(("text", "message"), COSTS, ids=range(len(COSTS)))
def test_step_times(tmp_path, capsys, text, message):
    path, cost = tmp_path / "traces.jsonl", tmp_path / "cost.json"
    path.write_text(json.dumps(GOOD) + "\n")
    cost.write_text(text)
    assert main(["replay", str(path), "--cost", str(cost)]) == 2
    error = capsys.readouterr().err
    assert f"{cost} is not a file of step times" in error


RUN = dict(
    texts=["ab"],
    tokens=[[1, 2]],
    logprobs=[[-1.0, -2.0]],
    finish_reasons=["stop"],
    sources=[["", "own"]],
    steps=[[1, 1]],
    prompt_ids=[3],
    seed=0,
    pieces={"1": "a", "2": "b", "3": "c"},
    stats=dict(
        tokens=2,
        steps=1,
        sample_steps=1,
        nodes_proposed=1,
        nodes_accepted=1,
        tokens_per_step=2.0,
        accepted=dict(own=1, sibling=0, prompt=0),
    ),
)
REPORTS = [
    *((text, message) for text, message in LINES),
    *(({k: v for k, v in RUN.items() if k != key}, f"must have '{key}'") for key in RUN),
    (RUN | {"texts": []}, "at least 1 as 'texts'"),
    (RUN | {"texts": [None]}, "sample 0 has no text"),
    (RUN | {"texts": [7]}, r"a string or null as 'texts\[0\]', got 7"),
    (RUN | {"texts": ["a", "b"]}, "'texts' per sample \\(1\\), got 2"),
    (RUN | {"steps": [[1]]}, r"2 entries in 'steps\[0\]', one per token, got 1"),
    (RUN | {"steps": [[1, 10**12]]}, "got 1000000000000"),
    (RUN | {"sources": [["", "mine"]]}, "got 'mine'"),
    (RUN | {"pieces": {"1": "a"}}, "must have the text of token"),
    (RUN | {"stats": {}}, "must have 'stats.tokens'"),
    (RUN | {"drafts": [[{"step": 1}]]}, r"must have 'drafts\[0\]\[0\].at'"),
    (RUN | {"characters": [{"0": 5}]}, r"a string as 'characters\[0\].0', got 5"),
    (RUN | {"model": 5}, "a string as 'model', got 5"),
]


@pytest.mark.parametrize(("run", "message"), REPORTS, ids=range(len(REPORTS)))
def test_reports(tmp_path, capsys, run, message):
    path = tmp_path / "out.json"
    path.write_text(run if isinstance(run, str) else json.dumps(run))
    assert main(["report", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"csd: {path} ") and error.count("\n") == 1
    assert re.search(message, error)
    assert not path.with_suffix(".html").exists()


def test_the_smallest_report(tmp_path):
    path = tmp_path / "out.json"
    path.write_text(json.dumps(RUN))
    assert main(["report", str(path)]) == 0


@pytest.mark.parametrize("content", ["junk", "pickle", "float", "square", "negative", "promise"])
def test_a_datastore_that_is_none(tmp_path, content):
    import numpy as np

    path = tmp_path / "store.npy"
    if content == "junk":
        path.write_bytes(b"junk")
    elif content == "promise":
        np.save(path, np.zeros(4, np.int32))
        path.write_bytes(path.read_bytes().replace(b"(4,)", b"(10000000000000,)"))
    else:
        values = dict(
            pickle=np.array([{}]),
            float=np.zeros(2),
            square=np.zeros((2, 2), int),
            negative=np.array([-2]),
        )
        np.save(path, values[content], allow_pickle=True)
    with pytest.raises(ValueError, match=str(path)):
        Datastore.load(path)


def test_a_datastore_of_another_model(tmp_path, toy_folder, capsys):
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps(GOOD | {"samples": [[3, 500]]}) + "\n")
    import csd

    options = dict(max_new_tokens=4, temperature=0.5, seed=0)
    expected = csd.generate(toy_folder, "ab", **options)
    message = "the datastore has token id 500, outside the model's vocabulary of 98"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            csd.generate(toy_folder, "ab", drafter=f"rest:{path}", **options)
    assert csd.generate(toy_folder, "ab", **options).tokens == expected.tokens
    csd.release()
