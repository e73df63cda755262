"""Recording and replaying from the command line."""

import json

import pytest
from helpers.runs.trace_file import trace_file

from csd.cli.main import main
from csd.cli.trace import prompts_of

pytestmark = pytest.mark.quick


def traces(tmp_path):
    text = [i % 7 for i in range(40)]
    row = {"prompt_ids": [5, 6, 0], "samples": [text, text[:25]]}
    return str(trace_file(tmp_path / "traces.jsonl", row))


def test_replay_prints_the_expected_gain(tmp_path, capsys):
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps({"rows": [1, 100], "seconds": [1.0, 1.0]}))
    code = main(["replay", traces(tmp_path), "--nodes", "0", "8", "--cost", str(cost), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert code == 0
    none, some = result["rows"]
    # without drafts nothing is gained; where rows cost nothing, the gain is the steps saved
    assert (none["tau"], none["speedup"], none["nodes_used"]) == (1, 1, 0)
    assert some["tau"] > 2 and some["speedup"] > 2 and some["nodes_used"] <= 8
    assert main(["replay", traces(tmp_path), "--nodes", "4", "--limit", "1"]) == 0
    assert "expected speed-up" in capsys.readouterr().out


def test_rows_that_cost_time_lower_the_gain(tmp_path, capsys):
    found = []
    for second in (1.0, 3.0):
        cost = tmp_path / "cost.json"
        cost.write_text(json.dumps({"rows": [2, 18], "seconds": [1.0, second]}))
        main(["replay", traces(tmp_path), "--nodes", "8", "--cost", str(cost), "--json"])
        found.append(json.loads(capsys.readouterr().out)["rows"][0]["speedup"])
    assert found[1] < found[0]


def test_equal_texts_share_rows(tmp_path, capsys):
    """Samples equal for 25 tokens: a row for each token of one, then 15 of the longer one."""
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps({"rows": [1, 2], "seconds": [1.0, 2.0]}))
    command = ["replay", traces(tmp_path), "--nodes", "0", "--cost", str(cost), "--json"]
    found = []
    for flags in ([], ["--no-share-rows"]):
        main([*command, *flags])
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        found.append((row["rows_per_token"], row["speedup"]))
    assert found == [(40 / 65, 65 / 40), (1, 1)]


def test_prompts_are_read(tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "c"}]
    rows = [{"prompt": "a"}, {"question": "b", "answer": 1}, {"prompt": chat}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert prompts_of(path, False) == ["a", "b", chat]
    assert prompts_of(path, True, 2)[1] == [{"role": "user", "content": "b"}]
    path.write_text('{"text": "a"}')
    with pytest.raises(ValueError, match="line 1 must have prompt, question or problem"):
        prompts_of(path, True)
    assert main(["record", "x", str(path), "-o", str(path)]) == 2
    assert "out must be a new file" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none")]) == 2


def test_without_step_times_no_speedup_is_claimed(tmp_path, capsys):
    assert main(["replay", traces(tmp_path), "--nodes", "8"]) == 0
    out = capsys.readouterr().out
    assert "speed-up" not in out.splitlines()[0] and "pass --model MODEL" in out
    bad = tmp_path / "bad.json"
    for text in ("[1, 2]", '{"rows": [1]}', "{", '{"rows": [1, 2], "seconds": [1.0]}'):
        bad.write_text(text)
        assert main(["replay", traces(tmp_path), "--cost", str(bad)]) == 2
        assert f"{bad} is not a file of step times" in capsys.readouterr().err
