"""Bytes at random for every reader: a value or an error that names the file, and in time."""

import gzip
import io
import json
import random

import numpy as np
import pytest
from helpers.runs.fuzzing import MANY, at_most, open_files

from csd.cli.trace import prompts_of
from csd.engine.step.budget import StepTimeTable
from csd.evaluate.answers.equality import canonical
from csd.evaluate.answers.extract import EXTRACTORS, answer_of
from csd.evaluate.evaluation import Results
from csd.evaluate.problems.tasks import TASKS, read
from csd.evaluate.replay import gain
from csd.evaluate.report import data
from csd.evaluate.resumable_results import ResumedFile, _check_line
from csd.research.baselines.rest import Datastore
from csd.traces.history import History
from csd.traces.traces import read_traces
from csd.utils.files import naming, read_file

TRACE = {
    "problem": "a/1",
    "prompt_ids": [1, 2, 7],
    "samples": [[3, 4], [5]],
    "temperature": 0.7,
    "seed": 3,
    "indices": [0, 1],
    "stop_ids": [5],
    "top": [[[[3, 1], [0.5, 0.25]], [[4, -1], [1.0, 0.0]]], [[[5], [1]]]],
}
ROW = dict(
    problem=0,
    answer="7",
    vote="7",
    vote_correct=True,
    answers=["7", None],
    correct=[True, False],
    finish_reasons=["stop", "length"],
    texts=["7", "é\n"],
    tokens=3,
    steps=2,
    seconds=0.5,
)
RUN = dict(
    texts=["ab"],
    tokens=[[1, 2]],
    logprobs=[[-1.0, -2.0]],
    finish_reasons=["stop"],
    sources=[["", "own"]],
    steps=[[1, 1]],
    prompt_ids=[3],
    seed=0,
    model="m",
    prompt="c",
    pieces={"1": "a", "2": "b", "3": "c"},
    characters=[{"1": "b"}],
    drafts=[
        [
            dict(
                step=1,
                at=0,
                tokens=[3, 1],
                parents=[-1, 0],
                probabilities=[1.0, 0.5],
                sources=["", "own"],
                path=[1],
            )
        ]
    ],
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
CHAT = [{"role": "user", "content": "7?"}]


def lines(*rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def array(values) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array(values))
    return file.getvalue()


def run_of(path, kind):
    rows = Results(path, {"model": "a"}) if kind else ResumedFile(path, {}, _check_line, "file")
    rows.close()


def report_of(path):
    result = read_file(path, dict)
    with naming(str(path)):
        data.check(result)
    data.votes(data.decision(result))
    data.steps(result)
    data.shared_runs(result)
    json.dumps(result, ensure_ascii=False).encode()


def replay_of(path):
    traces = list(read_traces(path))
    tokens = sum(len(s) for t in traces for s in t.samples)
    if traces and tokens < 40 and sum(len(t.prompt) for t in traces) < 1000:
        gain(traces, 4, StepTimeTable([1, 2], [1.0, 2.0]))


# the name of a file, what it may hold, its reader
READERS = {
    "traces": ("t.jsonl", [lines(TRACE), lines(TRACE, TRACE)], lambda p: list(read_traces(p))),
    "history": ("h.jsonl", [lines(TRACE), lines(TRACE, TRACE)], lambda p: History(path=p).close()),
    "gzipped traces": (
        "t.jsonl.gz",
        [gzip.compress(lines(TRACE) * 9, mtime=0)],
        lambda p: list(read_traces(p)),
    ),
    "problems": (
        "p.jsonl",
        [lines({"prompt": "6?", "answer": 6}, {"prompt": CHAT, "answer": "1"})],
        lambda p: read(p, TASKS["jsonl"]),
    ),
    "gsm8k": (
        "p.jsonl",
        [lines({"question": "6?", "answer": "a #### 1,006"})],
        lambda p: read(p, TASKS["gsm8k"]),
    ),
    "math": (
        "p.jsonl",
        [lines({"problem": "6?", "answer": r"\frac{1}{2}"})],
        lambda p: read(p, TASKS["math"]),
    ),
    "prompts": (
        "p.jsonl",
        [lines({"prompt": "a"}, {"question": "b"}, {"problem": CHAT})],
        lambda p: prompts_of(p, True),
    ),
    "results": (
        "r.jsonl",
        [lines({"settings": {"model": "a"}}, ROW, ROW | {"problem": 1})],
        lambda p: run_of(p, True),
    ),
    "recording": (
        "r.part",
        [lines({"settings": {}}, TRACE | {"problem": 0})],
        lambda p: run_of(p, False),
    ),
    "report": ("r.json", [json.dumps(RUN).encode()], report_of),
    "step times": (
        "c.json",
        [b'{"rows": [1, 2, 4], "seconds": [0.1, 0.2, 0.3]}'],
        lambda p: StepTimeTable.read(p)(3),
    ),
    "datastore": ("s.npy", [array([1, 2, -1, 3])], Datastore.load),
    "datastore of traces": ("s.jsonl", [lines(TRACE)], Datastore.load),
}
# what breaks readers: other values, other types, brackets, halves of characters
PIECES = [
    b"null",
    b"true",
    b"[]",
    b"{}",
    b"[[]]",
    b'""',
    b"-1",
    b"1.5",
    b"1e999",
    b"NaN",
    b"9" * 40,
    b"2147483648",
    b'"\\ud800"',
    b"[" * 200,
    b'{"a":' * 200,
    b"\x00",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\n",
    b"\r",
    b",",
    b":",
    b'"',
    b"\\",
    b"0",
    b"7",
    b"-",
    b"\xe2\x80\xa8",
    b" " * 100,
    b"",
]
# inputs of each fuzzer: the same ones every time, and beyond them with CSD_EXAMPLES
FEW, MOST = 250, 8_000


def inputs(few=FEW, most=MOST):
    return range(int(most * MANY) or few)


def edited(content: bytes, rng: random.Random) -> bytes:
    """`content` with up to four places changed."""
    for _ in range(rng.randrange(1, 5)):
        at, size = rng.randrange(len(content) + 1), rng.randrange(20)
        piece = rng.choice(PIECES) if rng.random() < 0.8 else rng.randbytes(rng.randrange(8))
        kind = rng.randrange(6)
        if kind < 2:
            # a value of the JSON
            at = max(content.rfind(b":", 0, at), content.rfind(b"[", 0, at)) + 1
            ends = [n for n in (content.find(c, at) for c in (b",", b"]", b"}")) if n >= 0]
            content = content[:at] + piece + content[min(ends, default=at) :]
        elif kind == 2:
            content = content[:at] + piece + content[at + len(piece) :]
        elif kind == 3:
            content = content[:at] + piece + content[at:]
        elif kind == 4:
            content = content[:at] + content[at + size :]
        else:
            content = content[:at] + content[at : at + size] * 3 + content[at + size :]
    return content


def try_reader(reader, path, content: bytes) -> bool:
    """True if the reader takes `content`; where it does not, its error names the file."""
    path.write_bytes(content)
    try:
        with at_most(1):
            reader(path)
    except ValueError as error:
        assert str(path) in str(error), content
        return False
    except Exception as error:
        raise AssertionError(f"{error!r} for {content!r}") from error
    return True


@pytest.mark.parametrize("name", READERS)
def test_bytes(tmp_path, name):
    file, bases, reader = READERS[name]
    path = tmp_path / file
    assert all(try_reader(reader, path, base) for base in bases)
    before, taken = open_files(), 0
    for i in inputs():
        rng = random.Random(f"{name} {i}")
        taken += try_reader(reader, path, edited(rng.choice(bases), rng))
    assert open_files() == before
    # neither a reader that takes all nor one that takes nothing is tested by this
    assert 0 < taken < len(inputs())


ALPHABET = [
    *"\\{}$.,-+/%^() 0123456789exyé×π\n",
    "\\frac",
    "\\boxed{",
    "\\text{",
    "answer is ",
    "\\sqrt",
    "\\times",
    "10^",
    "**",
    "####",
    "\u2212",
    "\u0661",
    "\u00b2",
    "\x00",
]


def test_texts_that_models_write():
    # the first expression imports SymPy
    canonical("x+1")
    for i in inputs(1000):
        rng = random.Random(i)
        text = "".join(rng.choice(ALPHABET) for _ in range(rng.randrange(60)))
        try:
            with at_most(1):
                for extract in (answer_of, *EXTRACTORS.values()):
                    extract(text)
                    extract(f"so \\boxed{{{text}}}. The answer is {text}")
                canonical(text)
        except Exception as error:
            raise AssertionError(f"{error!r} for {text!r}") from error


@pytest.mark.parametrize("piece", ALPHABET)
def test_one_thing_many_times(piece):
    """No pattern takes time that is not nearly in proportion to a text."""
    for begin in ("", "\\boxed{", "The answer is "):
        for read_text in (answer_of, canonical):
            with at_most(2):
                read_text(begin + piece * 20_000)


def test_replays_of_read_traces(tmp_path):
    path = tmp_path / "t.jsonl"
    for i in inputs(40, 400):
        try_reader(replay_of, path, edited(lines(TRACE), random.Random(i)))
