"""The command line."""

import json

import csd
from csd.cli import main


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
