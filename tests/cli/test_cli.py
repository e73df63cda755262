"""The command line."""

import json

import csd
from csd.cli.main import main


def test_sample_prints_one_json_object(toy_folder, capsys):
    code = main(
        ["sample", toy_folder, "What is 2 + 3?", "-n", "3", "--max-new-tokens", "12",
         "--temperature", "0.7", "--seed", "1", "--budget", "8", "--json"]
    )  # fmt: skip
    out = capsys.readouterr().out
    csd.release()
    assert code == 0
    assert len(out.splitlines()) == 1
    result = json.loads(out)
    assert len(result["texts"]) == len(result["tokens"]) == 3
    assert all(len(t) == len(p) for t, p in zip(result["tokens"], result["logprobs"], strict=True))
    assert set(result["finish_reasons"]) <= {"stop", "length"}
    assert result["seed"] == 1
    assert result["stats"]["tokens"] == sum(map(len, result["tokens"]))


def test_errors_are_one_line(capsys, tmp_path):
    assert main(["sample", str(tmp_path), "x"]) == 2
    assert "no config.json" in capsys.readouterr().err


def test_history_is_read_and_added_to(toy_folder, capsys, tmp_path):
    path = tmp_path / "history.jsonl"
    command = [
        "sample", toy_folder, "What is 2 + 3?", "-n", "3", "--max-new-tokens", "12",
        "--temperature", "0.7", "--seed", "1", "--budget", "8", "--json", "--history", str(path),
    ]  # fmt: skip
    found = []
    for _ in range(2):
        assert main(command) == 0
        found.append(json.loads(capsys.readouterr().out))
    csd.release()
    assert found[0]["tokens"] == found[1]["tokens"]
    assert [f["stats"]["accepted"]["history"] > 0 for f in found] == [False, True]
    assert [json.loads(x)["samples"] for x in path.read_text().splitlines()] == [
        found[0]["tokens"], found[0]["tokens"]
    ]  # fmt: skip
    path.write_text("no trace\n")
    assert main(command) == 2
    assert "history.jsonl, line 1: the trace is not JSON" in capsys.readouterr().err
