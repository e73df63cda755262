"""`csd doctor MODEL` prints what a step costs, and the acceptance with which drafts pay."""

import json

import pytest

from csd.cli.doctor import shown_costs, step_costs
from csd.cli.main import main
from csd.engine.resources.step_times import StepTimes
from csd.engine.step.budget import StepTimeTable
from csd.models.demo import toy


def test_the_acceptance_needed_pays_for_the_longer_step():
    table = StepTimeTable([1, 8, 16, 32], [0.010, 0.012, 0.018, 0.048], steady=False)
    costs = step_costs(table)
    needed = {row["rows"]: row["acceptance_needed"] for row in costs["rows"]}
    assert needed[1] is None and needed[8] is None
    for rows in (16, 32):
        tokens = 1 + needed[rows] * (rows - 8) / 8
        assert tokens == pytest.approx(table(rows) / table(8), abs=0.01)
    text = shown_costs(costs)
    assert "50%" in text and "    16         18.00  50%" in text
    assert "disturbed" in text and "(no drafts)" in text
    never = shown_costs(step_costs(StepTimeTable([8, 16], [1.0, 3.0])))
    assert "never" in never and "disturbed" not in never


def test_doctor_prints_the_table_of_a_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    table = StepTimeTable([1, 8, 16], [0.010, 0.012, 0.018])
    monkeypatch.setattr(StepTimes, "measure", lambda self, repeats=3: table)
    for part in toy():
        part.save_pretrained(tmp_path / "toy")
    asked = ["doctor", str(tmp_path / "toy"), "--device", "cpu", "--dtype", "float32"]
    assert main([*asked, "--kernels", "reference"]) == 0
    assert shown_costs(step_costs(table)) in capsys.readouterr().out
    assert main([*asked, "--kernels", "reference", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == step_costs(table)
