"""The command line, on the real model."""

import json

import csd
from csd.cli import main
from csd.models.demo import smollm2_path


def test_sample_prints_one_json_object(capsys):
    code = main(
        ["sample", smollm2_path(), "What is 2 + 3?", "-n", "3", "--max-new-tokens", "12",
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
