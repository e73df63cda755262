"""`csd doctor MODEL` prints what a step costs, and the acceptance with which drafts pay."""

import json
from dataclasses import replace

import pytest

import csd
from csd.cli import doctor
from csd.cli.doctor import shown_costs, step_costs
from csd.cli.main import main
from csd.doctor import check
from csd.doctor.verification import shown_verification, verification
from csd.engine.resources.step_times import StepTimes
from csd.engine.step.budget import StepTimeTable
from csd.models.demo import toy
from csd.state.filters import FILTERS


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
    assert "(no drafts)" in text
    never = StepTimeTable([8, 16], [1.0, 3.0])
    assert shown_costs(step_costs(never)).count("never") == 1


def test_what_was_timed_beside_other_work_is_marked():
    """Each figure that the load may have changed, and none of an idle machine."""
    sizes, seconds = [8, 16, 32], [1.0, 1.2, 9.0]
    found = {"settings": {}, "milliseconds": 1.0, "without": 1.0}
    for steady in (True, False):
        costs = step_costs(StepTimeTable(sizes, seconds, steady=steady))
        table, text = shown_costs(costs), shown_verification(found, 8, costs["steady"])
        assert ("while other work ran" in table) != steady
        assert ("beside other work" in text) != steady
        marked = [line for line in table.splitlines() if line.endswith(" ?")]
        assert [line.split()[-2:] for line in marked] == (
            [] if steady else [["20%", "?"], ["never", "?"]]
        )


def test_doctor_prints_the_table_of_a_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    table = StepTimeTable([1, 8, 16], [0.010, 0.012, 0.018])
    monkeypatch.setattr(StepTimes, "measure", lambda self, repeats=3: table)
    reports = []

    def check_once(*args, **how):
        if not reports:
            reports.append(check(*args, **how))
        return reports[0]

    monkeypatch.setattr(doctor, "check", check_once)
    for part in toy():
        part.save_pretrained(tmp_path / "toy")
    asked = ["doctor", str(tmp_path / "toy"), "--device", "cpu", "--dtype", "float32"]
    assert main([*asked, "--kernels", "reference"]) == 0
    assert shown_costs(step_costs(table)) in capsys.readouterr().out
    assert main([*asked, "--kernels", "reference", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == step_costs(table)
    assert found["verification"]["settings"] == {} and found["verification"]["milliseconds"] > 0


def test_verification_is_timed_with_the_settings_of_the_generation_config(monkeypatch):
    model, tokenizer = toy()
    own = {"temperature": 0.5, "top_k": 7, "top_p": 0.8, "repetition_penalty": 1.1}
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    seen = []
    engine = csd.Engine(model, tokenizer=tokenizer)
    verify = engine.ops.verify

    def recorded(logits, pool, slots):
        seen.append({name: getattr(slots, name).unique().item() for name in FILTERS})
        assert pool.rows == logits.shape[0] == 8 and slots.seen.any()
        return verify(logits, pool, slots)

    engine.ops = replace(engine.ops, verify=recorded)
    found = verification(engine, 8)
    assert found["settings"] == own and found["milliseconds"] > 0 < found["without"]
    half = len(seen) // 2
    assert seen == [FILTERS | own] * half + [FILTERS | {"temperature": 0.5}] * half
    text = shown_verification(found, 8)
    assert "(temperature 0.5, top_k 7, top_p 0.8, repetition_penalty 1.1)" in text
    assert "no settings" in shown_verification(found | {"settings": {}}, 8)
