"""`python -m bench limits`: what is taken away shows in the figures."""

import json

import pytest
from helpers.runs.trace_file import trace_file
from helpers.targets import slow

from bench.studies.drafting import limits

pytestmark = pytest.mark.bench


@pytest.fixture
def traces(tmp_path):
    """Two prompts, each with a sample and one twenty tokens ahead of it; nothing repeats."""
    rows = []
    for i in range(2):
        text = list(range(100 + 1000 * i, 160 + 1000 * i))
        rows.append({"problem": f"sums/{i}@0.7", "samples": [text[:40], text[20:]]})
    return trace_file(tmp_path / "traces.jsonl", *rows)


@slow
def test_a_sample_alone_has_nothing_to_draft_from(traces, tmp_path, capsys):
    live = {"task": "words", "samples": 4, "tau": 1.5, "csd/plain": 1.2, "low": 1.1, "high": 1.3}
    live["other"] = 0
    (tmp_path / "cpu.json").write_text(json.dumps({"rows": [live]}))
    path = tmp_path / "limits.json"
    arguments = ["--traces", str(traces), "--live", str(tmp_path / "cpu.json")]
    assert limits.main([*arguments, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(path.read_text())
    assert json.loads(printed.splitlines()[-1]) == found
    alone, two = found["rows"]
    assert (alone["condition"], two["condition"]) == ("one sample", "two samples")
    assert alone["tau"] == 1
    # no draft pays: the one that is ahead has none, and two end with it
    for row in (alone, two):
        assert row["expected speed-up"] == 1 and row["best nodes"] == 0
    # who is ahead gains nothing, and who is behind catches up at most
    assert 1.05 < two["tau"] <= 80 / 60
    # both prompts are alike
    assert two["low"] == pytest.approx(two["high"]) == pytest.approx(two["tau"])
    assert found["live"] == [{k: v for k, v in live.items() if k != "other"}]


def test_answers_are_cut_with_their_probabilities():
    trace = limits.Trace("a", [1], [[5, 6, 7], [8]], 1.0, [[5, 6, 7], [8]])
    short = limits.cut(trace, 2)
    assert short.samples == short.top == [[5, 6], [8]]
