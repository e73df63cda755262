"""csd eval: figures from rows, and runs that are interrupted."""

import json
import os
import signal
import subprocess
import sys

import pytest
from helpers.targets import slow

import csd
from csd.cli.main import main
from csd.evaluate import evaluation as evaluate
from csd.evaluate.vote import Vote
from csd.models.demo import toy

PROBLEMS = 7
TIMES = ("seconds", "steps")  # how long it took is not what was drawn


@pytest.fixture(scope="module")
def place(tmp_path_factory, toy_folder):
    """A folder with the toy model and a file of problems, two of which are the same."""
    folder = tmp_path_factory.mktemp("eval")
    (folder / "toy").symlink_to(toy_folder)
    # to three of these prompts a sample has an answer
    rows = [{"prompt": f"Say {10 + i % 6}.", "answer": str(i % 10)} for i in range(PROBLEMS)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    yield folder
    csd.release()


def command(place, out, *more) -> list[str]:
    return [
        "eval",
        str(place / "problems.jsonl"),
        "--model",
        str(place / "toy"),
        "-n",
        "4",
        "--max-new-tokens",
        "24",
        "--budget",
        "8",
        "--batch",
        "1",
        "-o",
        str(place / out),
        *more,
    ]


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def drawn(rows, but=TIMES) -> list[dict]:
    return [{k: v for k, v in r.items() if k not in but} for r in rows]


@pytest.fixture(scope="module")
def whole(place):
    """The rows of a run that nothing interrupts."""
    assert main(command(place, "whole.jsonl", "--quiet")) == 0
    return lines(place / "whole.jsonl")


# the fifth problem's first sample is its process's last
KILLED = """
import os, signal, sys
from csd.evaluate import evaluation as evaluate
from csd.cli.main import main
draw, calls = evaluate._draw, []

def killed(engine, prompts, on_sample, **options):
    calls.append(prompts)
    if len(calls) == 5:
        on_sample = lambda: os.kill(os.getpid(), signal.SIGKILL)
    return draw(engine, prompts, on_sample, **options)

evaluate._draw = killed
main(sys.argv[1:])
"""


@slow
def test_a_run_that_was_killed_goes_on_and_equals_one_that_was_not(place, whole, capsys):
    path = place / "killed.jsonl"
    process = subprocess.run(
        [sys.executable, "-c", KILLED, *command(place, "killed.jsonl", "--quiet")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == -signal.SIGKILL
    rows = lines(path)
    assert len(rows) == 1 + 4
    # a kill in the middle of a write leaves the start of a line
    with path.open("a") as f:
        f.write(json.dumps(whole[len(rows)])[:40])

    assert main(command(place, "killed.jsonl")) == 0
    streams = capsys.readouterr()
    assert f"holds {len(rows) - 1} of {PROBLEMS} problems" in streams.err
    assert f"{4 * PROBLEMS}/{4 * PROBLEMS}" in streams.err
    resumed = lines(path)
    assert resumed[: len(rows)] == rows
    assert drawn(resumed, but=["seconds"]) == drawn(whole, but=["seconds"])
    figures = json.loads(streams.out.splitlines()[-1])
    expected = json.loads((place / "whole.summary.json").read_text())
    for row in (*figures["by_k"], *expected["by_k"]):
        del row["seconds"]
    for name, value in expected.items():
        if "second" not in name:
            assert figures[name] == value, name


def test_rows_are_what_generate_draws(place, whole):
    assert [r["problem"] for r in whole[1:]] == list(range(PROBLEMS))
    prompt = [{"role": "user", "content": "Say 10."}]
    model, tokenizer = toy()
    options = dict(tokenizer=tokenizer, max_new_tokens=24, seed=0, budget=8)
    out = csd.generate(model, prompt, num_samples=8, **options)
    assert whole[1]["texts"] == out.texts[:4]
    # the last problem repeats the first and has samples of its own
    assert whole[PROBLEMS]["texts"] == out.texts[4:]
    row = whole[1]
    assert row["correct"] == [a == row["answer"] for a in row["answers"]]
    assert row["vote"] == csd.vote(list(out)[:4], limited=False).answer


@pytest.mark.parametrize("batch", ["5", "auto"])
def test_batches_do_not_change_what_is_drawn(place, whole, batch):
    out = f"batch{batch}.jsonl"
    assert main(command(place, out, "--quiet", "--batch", batch)) == 0
    assert drawn(lines(place / out)) == drawn(whole)


def test_a_history_changes_nothing_of_what_is_drawn(place, whole):
    history = place / "history.jsonl"
    for name in ("first.jsonl", "second.jsonl"):
        assert main(command(place, name, "--quiet", "--history", str(history))) == 0
    first, second = lines(place / "first.jsonl"), lines(place / "second.jsonl")
    assert drawn(first) == drawn(second) == drawn(whole)
    steps = [sum(r["steps"] for r in rows[1:]) for rows in (first, second)]
    assert steps[1] < steps[0]


def test_a_prior_changes_nothing_of_what_is_drawn(place, whole, capsys):
    prior = csd.Prior()
    prior.add([1], [[2, 3, 4, 5]])
    prior.save(place / "p.csdprior")
    assert main(command(place, "prior.jsonl", "--quiet", "--prior", str(place / "p.csdprior"))) == 0
    assert drawn(lines(place / "prior.jsonl")) == drawn(whole)
    assert main(command(place, "refused.jsonl", "--quiet", "--prior", "missing")) == 2
    assert "missing" in capsys.readouterr().err


def test_stopping_at_a_decided_vote_keeps_every_vote(place, whole):
    assert main(command(place, "decided.jsonl", "--quiet", "--until-decided")) == 0
    rows = lines(place / "decided.jsonl")[1:]
    assert [r["vote"] for r in rows] == [r["vote"] for r in whole[1:]]
    assert sum(len(r["texts"]) for r in rows) < 4 * PROBLEMS
    figures = json.loads((place / "decided.summary.json").read_text())
    assert figures["samples_counted"] == 2
    assert "pass@4" not in figures


def test_ctrl_c_leaves_whole_problems(place, whole, monkeypatch, capsys):
    row = evaluate._row
    calls = []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return row(*args)

    monkeypatch.setattr(evaluate, "_row", interrupted)
    assert main(command(place, "stopped.jsonl", "--quiet")) == 130
    assert "to continue from" in capsys.readouterr().err
    assert drawn(lines(place / "stopped.jsonl")) == drawn(whole[:3])
    monkeypatch.undo()
    assert main(command(place, "stopped.jsonl", "--quiet")) == 0
    assert drawn(lines(place / "stopped.jsonl")) == drawn(whole)


def test_other_settings_and_a_held_file_are_refused(place, whole, capsys):
    assert main(command(place, "whole.jsonl", "--seed", "1")) == 2
    assert "other settings (seed 0, now 1); choose another -o" in capsys.readouterr().err
    held = evaluate.Results(place / "held.jsonl", {})
    with pytest.raises(ValueError, match="being written by another process"):
        evaluate.Results(place / "held.jsonl", {})
    held.close()
    (place / "other.jsonl").write_text('{"prompt": "mine"}\n')
    assert main(command(place, "other.jsonl")) == 2
    assert "not a results file" in capsys.readouterr().err
    assert (place / "other.jsonl").read_text() == '{"prompt": "mine"}\n'
    assert main(command(place, "new.jsonl", "-n", "0")) == 2
    assert "num_samples must be at least 1, got 0" in capsys.readouterr().err


def test_a_problem_that_does_not_fit_is_named_before_anything_is_drawn(place, tmp_path, capsys):
    path = tmp_path / "long.jsonl"
    rows = [{"prompt": "Say 1.", "answer": "1"}, {"prompt": "x" * 9000, "answer": "2"}]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    out = tmp_path / "out.jsonl"
    assert main(["eval", str(path), "--model", str(place / "toy"), "-o", str(out)]) == 2
    assert "csd: problem 1: the prompt has 90" in capsys.readouterr().err
    assert len(lines(out)) == 1


def test_fewer_problems_of_a_longer_run(place, whole, capsys):
    """--limit takes the first rows; the file keeps the others."""
    before = (place / "whole.jsonl").read_bytes()
    summary = (place / "whole.summary.json").read_bytes()
    assert main(command(place, "whole.jsonl", "--limit", "3")) == 0
    streams = capsys.readouterr()
    assert "holds 3 of 3 problems" in streams.err and "12/12" in streams.err
    assert json.loads(streams.out.splitlines()[-1])["problems"] == 3
    assert (place / "whole.jsonl").read_bytes() == before
    (place / "whole.summary.json").write_bytes(summary)


def test_a_file_of_problems_that_has_changed_is_refused(place, whole, tmp_path, capsys):
    changed = tmp_path / "problems.jsonl"
    changed.write_text((place / "problems.jsonl").read_text().replace("Say 13.", "Say 14."))
    arguments = command(place, "whole.jsonl")
    arguments[1] = str(changed)
    assert main(arguments) == 2
    assert "was written with other settings (problems_sha256" in capsys.readouterr().err


def test_a_problem_that_cannot_be_served_counts_as_unsolved(place, whole, capsys):
    problems = json.loads((place / "toy" / "config.json").read_text())
    long = "a" * problems["max_position_embeddings"]
    rows = [{"prompt": p, "answer": str(i)} for i, p in enumerate(("Say 10.", long, "Say 12."))]
    (place / "long.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    given = command(place, "served.jsonl", "--quiet", "--batch", "3")
    given[1] = str(place / "long.jsonl")
    assert main(given) == 2
    assert "problem 1: " in capsys.readouterr().err
    assert main([*given, "--on-error", "return"]) == 0
    first, refused, last = lines(place / "served.jsonl")[1:]
    assert [first["texts"], last["texts"]] == [whole[1]["texts"], whole[3]["texts"]]
    assert first["error"] is None and "tokens" in refused["error"]
    assert refused["correct"] == [False] * 4 and refused["finish_reasons"] == ["error"] * 4
    figures = json.loads((place / "served.summary.json").read_text())
    assert figures["problems"] == 3 and figures["finish_reasons"]["error"] == pytest.approx(1 / 3)
    # cut to its end it is served
    given[given.index("-o") + 1] = str(place / "cut.jsonl")
    assert main([*given, "--truncate-prompt", "40"]) == 0
    assert [r["error"] for r in lines(place / "cut.jsonl")[1:]] == [None] * 3


def row(correct, vote_correct, ends=("stop",)):
    return dict(
        answer="True",
        correct=correct,
        vote_correct=vote_correct,
        answers=[str(c) for c in correct],
        finish_reasons=list(ends),
        tokens=30,
        steps=20,
        seconds=2.0,
    )


def test_summary():
    rows = [
        row([True, False, False, False], False, ["stop", "length", "length", "length"]),
        row([True, True, False, True], True, ["stop", "length", "length", "length"]),
    ]
    figures = evaluate.summary(rows, 4)
    by_k = {at["k"]: at for at in figures["by_k"]}
    assert by_k[1]["maj_at_k"][0] == by_k[1]["pass_at_k"][0] == 0.5
    assert by_k[4]["maj_at_k"][0] == 0.5
    assert by_k[2]["pass_at_k"][0] == (0.5 + 1) / 2
    assert by_k[4]["pass_at_k"][0] == 1
    assert figures["limited"] == 6
    assert (figures["tau"], figures["tokens_per_second"]) == (1.5, 15)
    assert figures["finish_reasons"] == {"length": 0.75, "stop": 0.25}
    mean, low, high = by_k[1]["maj_at_k"]
    assert 0 < low < mean < high < 1
    # of three samples drawn, the two that are drawn in any case
    stopped = [row([True, False, True], True)]
    figures = evaluate.summary(stopped, 4, Vote())
    assert figures["by_k"][0]["pass_at_k"][0] == 0.5
    assert figures["samples_drawn"] == 3
