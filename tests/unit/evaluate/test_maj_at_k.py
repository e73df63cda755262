"""maj@k against all orders of the samples, and the figures and curves made of it."""

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csd.cli.main import main
from csd.engine.results.result import Sample
from csd.evaluate import evaluation
from csd.evaluate.pass_at_k import maj_at_k
from csd.evaluate.plot import curve
from csd.evaluate.vote import Vote, vote


def by_orders(answers, right, k):
    """The share of ordered choices whose first most frequent answer is right."""
    wins = total = 0
    for chosen in itertools.permutations(answers, k):
        votes = {}
        for answer in chosen:
            if answer is not None:
                votes[answer] = votes.get(answer, 0) + 1
        wins += bool(votes) and max(votes, key=votes.get) == right
        total += 1
    return wins / total


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(["r", "a", "b", "c", None]), min_size=1, max_size=6), st.data())
def test_equals_all_orders(answers, data):
    k = data.draw(st.integers(1, len(answers)))
    assert maj_at_k(answers, "r", k) == pytest.approx(by_orders(answers, "r", k), abs=1e-12)


def test_of_many_samples():
    answers = ["r"] * 300 + ["a"] * 200 + [None] * 12
    assert maj_at_k(answers, "r", 1) == pytest.approx(300 / 512)
    values = [maj_at_k(answers, "r", k) for k in (3, 33, 255, 511)]
    assert values == sorted(values) and values[-1] == pytest.approx(1)
    assert maj_at_k(answers, "z", 8) == 0
    for k in (0, 513):
        with pytest.raises(ValueError, match="k must lie between 1 and the 512"):
            maj_at_k(answers, "r", k)


def test_cut_samples_vote_only_where_asked():
    texts = [("5", "stop"), ("7", "length"), ("7", "length")]
    out = [Sample(i, text, [], [], [], reason) for i, (text, reason) in enumerate(texts)]
    assert vote(out, limited=True).answer == "7"
    found = vote(out)
    assert found.answers == ["5", None, None] and found.limited == 2
    assert str(found) == (
        "5 (1 of 1 votes, 100%, 2 of 3 samples without an answer, 2 of them cut at max_new_tokens)"
    )
    assert str(vote(out[1:])) == "no answer in 2 samples, 2 of them cut at max_new_tokens"
    assert Vote().of(5)(out) is False
    assert Vote(limited=True).of(3)(out) is True


def test_a_decision_has_no_truth():
    out = [Sample(0, "5", [], [], [], "stop")]
    with pytest.raises(TypeError, match="neither true nor false"):
        bool(vote(out))


def row(problem, answers, right="1", **more):
    correct = [a == right for a in answers]
    return (
        dict(
            problem=problem,
            answer=right,
            vote=answers[0],
            vote_correct=correct[0],
            answers=answers,
            correct=correct,
            finish_reasons=["stop"] * len(answers),
            texts=list(answers),
            tokens=10 * len(answers),
            steps=5 * len(answers),
            seconds=2.0,
        )
        | more
    )


def test_accuracy_and_cost_by_k():
    rows = [row(0, ["1", "1", "2", "3"]), row(1, ["2", "2", "1", "2"])]
    found = {at["k"]: at for at in evaluation.summary(rows, 4)["by_k"]}
    assert [*found] == [1, 2, 4]
    assert found[1]["maj_at_k"][0] == found[1]["pass_at_k"][0] == (0.5 + 0.25) / 2
    assert found[4]["maj_at_k"][0] == 0.5 and found[4]["pass_at_k"][0] == 1
    assert [found[k]["tokens"] for k in found] == [20, 40, 80]
    assert [found[k]["seconds"] for k in found] == [1, 2, 4]
    # the draws that a decision spared are no cost; what depends on it is not averaged over
    short = [row(0, ["1", "1", "1"]), row(1, ["2", "2", "2", "1"])]
    found = {at["k"]: at for at in evaluation.summary(short, 4, Vote())["by_k"]}
    assert [*found] == [1, 2, 4] and found[4]["tokens"] == 70
    assert found[4]["pass_at_k"] is None and found[2]["pass_at_k"][0] == 0.5


def results(path, rows, **settings):
    lines = [{"settings": {"num_samples": 4, **settings}}, *rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_curves_of_results_files(tmp_path, capsys):
    rows = [row(0, ["1", "1", "2", "3"]), row(1, ["2", "2", "1", "2"])]
    path = results(tmp_path / "a.jsonl", rows)
    points = curve(path, "tokens", "maj")
    assert [(p.k, p.cost) for p in points] == [(1, 10), (2, 20), (4, 40)]
    assert [p.cost for p in curve(path, "samples", "pass")] == [1, 2, 4]
    assert all(p.low <= p.value <= p.high for p in points)
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    other = results(tmp_path / "b.jsonl", rows[:1])
    out = tmp_path / "curve.svg"
    assert main(["plot", path, other, "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert "<svg" in out.read_text()
    assert len(re.findall(r'id="FillBetweenPolyCollection_\d+"', out.read_text())) == 2
    assert main(["plot", path, "-o", str(tmp_path / "curve.txt")]) == 2
    assert "out must end in one of" in capsys.readouterr().err


def test_errors_name_the_file(tmp_path, capsys):
    (tmp_path / "none.jsonl").write_text('{"a": 1}\n')
    assert main(["plot", str(tmp_path / "none.jsonl"), "-o", "x.svg"]) == 2
    assert "none.jsonl must be a results file of csd eval" in capsys.readouterr().err
    path = results(tmp_path / "bad.jsonl", [row(0, ["1"]) | {"tokens": "x"}])
    assert main(["plot", path, "-o", "x.svg"]) == 2
    assert "bad.jsonl, line 2 must have a whole number" in capsys.readouterr().err
    assert main(["plot", results(tmp_path / "e.jsonl", []), "-o", "x.svg"]) == 2


@pytest.mark.parametrize("command", ["plot", "report"])
@pytest.mark.parametrize(
    ("settings", "wrong"),
    [(dict(num_samples=value), "'num_samples'") for value in (None, "4", 2.5, 0, -1, True, [4])]
    + [
        ({}, "'num_samples'"),
        (dict(num_samples=4, until_decided="no"), "'until_decided'"),
        (dict(num_samples=8), "line 2 must have 8 samples, got 4"),
        (dict(num_samples=10, until_decided=True), "line 2 must have 5 to 10 samples, got 4"),
        (dict(num_samples=3), "line 2 must have 3 samples, got 4"),
    ],
    ids=str,
)
def test_settings_that_no_run_writes_are_named(tmp_path, capsys, settings, wrong, command):
    path, out = tmp_path / "bad.jsonl", tmp_path / "out.html"
    lines = [{"settings": settings}, row(0, ["1", "1", "2", "3"])]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([command, str(path), "-o", str(out.with_suffix(".svg"))]) == 2
    error = capsys.readouterr().err
    assert "bad.jsonl, line" in error and wrong in error and error.count("\n") == 1
