"""Every flag of every command with odd values: served, or an error that names it."""

import json
from functools import cache

import pytest
from helpers.runs.odd_values import ODD
from helpers.targets import few

from csd.cli import main as command
from csd.cli.main import main
from csd.models.demo import toy

pytestmark = pytest.mark.quick

NUMBERS = [str(v) for v in ODD if isinstance(v, int) and abs(v) < 2**99] + ["9" * 5000]
TEXTS = [
    "",
    "no",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "5e-324",
    "0.5",
    "1_0",
    "\u0663",
    "0x10",
    "auto",
    "None",
    "True",
    "\udcff",
    "a b",
    "rest:",
    "rest:none",
    "gpu",
    "cuda:99",
]
# values of other flags, without which a flag is refused
BESIDE = {("train-head", flag): ["--eagle=3"] for flag in ("--depth", "--decay", "--draft-vocab")}
FILES = {"-o", "--out", "--record", "--history", "--cost", "--prior"}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Positional arguments of each command."""
    folder = tmp_path_factory.mktemp("flags")
    for part in toy(layers=4):
        part.save_pretrained(folder / "model")
    row = {"prompt": "a b", "answer": "1"}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    trace = {
        "problem": 0,
        "prompt_ids": [1, 2],
        "samples": [[3, 4, 5]] * 2,
        "temperature": 1.0,
        "seed": 0,
        "indices": [0, 1],
    }
    (folder / "traces.jsonl").write_text(json.dumps(trace) + "\n")
    learnt = [trace | {"prompt_ids": [i, 2]} for i in (1, 3)]
    (folder / "learnt.jsonl").write_text("".join(json.dumps(row) + "\n" for row in learnt))
    (folder / "log.jsonl").write_text(json.dumps({"prompt": "a", "completions": ["b"]}) + "\n")
    model, rows = str(folder / "model"), str(folder / "rows.jsonl")
    return {
        "sample": [model, "a", "--max-new-tokens=2"],
        "record": [model, rows, "-o", str(folder / "out.jsonl"), "--max-new-tokens=2"],
        "eval": [rows, "--model", model, "-o", str(folder / "eval.jsonl"), "--max-new-tokens=2"],
        "replay": [str(folder / "traces.jsonl"), "--nodes", "2"],
        "audit": [str(folder / "traces.jsonl"), "--model", model],
        "doctor": ["--dtype=float32", "--kernels=reference"],
        "train-head": [model, str(folder / "learnt.jsonl"), "-o", str(folder / "head")],
        "import": [str(folder / "log.jsonl"), "--model", model, "-o", str(folder / "new.jsonl")],
        "plot": [str(folder / "none.jsonl"), "-o", str(folder / "curve.svg")],
        "report": [str(folder / "none.json")],
        "serve": [model, "--port=0"],
        "warmup": [model, "--max-new-tokens=2", "--prompt-tokens=2"],
        "prior": [
            str(folder / "traces.jsonl"),
            "-o",
            str(folder / "new.csdprior"),
            "--contexts=1024",
        ],
    }


def flags():
    """(command, flag) of all that take a value."""
    parsers = {}

    class Taken(Exception):
        pass

    def take(parser, argv=None):
        parsers.update(parser._subparsers._group_actions[0].choices)
        raise Taken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command.argparse.ArgumentParser, "parse_known_args", take)
        with pytest.raises(Taken):
            main([])
    for name, parser in parsers.items():
        for action in parser._actions:
            # a model is what it is called by, and a report's file is checked before its page
            if action.option_strings and action.nargs != 0 and action.dest != "model":
                yield name, action.option_strings[-1], action.dest


class Served(Exception):
    """In place of drawing."""


# takes longer than the check of a value
parser = cache(command.make_parser)


@few(20)
@pytest.mark.parametrize("name, flag, dest", flags(), ids=lambda x: x)
def test_flags(name, flag, dest, places, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "make_parser", parser)

    def stop(*args, **options):
        raise Served

    # what a call is checked by, and no more: that is tested without the command
    monkeypatch.setattr("csd.engine.engine.Engine.run", stop)
    monkeypatch.setattr("csd.cli.doctor.check", stop)
    if name == "serve":
        # each loads a model of its own
        monkeypatch.setattr("csd.engine.resources.model.load", stop)
    monkeypatch.setattr("csd.evaluate.replay.gain", stop)
    monkeypatch.setattr("csd.research.training.train_head.Run", stop)
    monkeypatch.setattr("csd.cli.trace.write_traces", stop)
    monkeypatch.setattr("csd.graph.prior.Prior.save", stop)
    served = 0
    for value in TEXTS + (NUMBERS if flag not in FILES else []):
        given = [x for x in places[name] if not x.startswith(flag + "=")]
        given += BESIDE.get((name, flag), [])
        try:
            code = main([name, *given, f"{flag}={value}"])
        except SystemExit as stopped:
            code = stopped.code
        except Served:
            served += 1
            capsys.readouterr()
            continue
        errors = capsys.readouterr().err
        assert code == 2, (value, code, errors)
        last = errors.strip().splitlines()[-1]
        if name in ("report", "plot"):
            continue
        assert any(x in last for x in (dest, flag, value, repr(value)[1:-1])), (value, errors)


@pytest.mark.parametrize(
    "name, flag, value, code",
    [
        ("sample", "--top-k", 2**31, 0),
        ("sample", "--budget", 4_000_000_000, 0),
        ("sample", "--seed", 2**64 - 1, 0),
        ("sample", "--first-sample", 2**31 - 8, 0),
        ("sample", "--first-sample", 2**31 - 1, 2),
        ("sample", "--num-samples", 10**9, 2),
        ("sample", "--temperature", 5e-324, 2),
        ("record", "--limit", -1, 2),
        ("replay", "--limit", 0, 2),
        ("doctor", "--head-dim", 15, 2),
        ("doctor", "--heads", 10**9, 2),
        ("doctor", "--device", "meta", 2),
    ],
    ids=str,
)
def test_what_ended_with_a_traceback(name, flag, value, code, places, capsys):
    assert main([name, *places[name], f"{flag}={value}"]) == code
    output = capsys.readouterr()
    if code:
        assert flag[2:].replace("-", "_") in output.err
    else:
        assert "--- sample" in output.out
