"""Training a head from the command line."""

import json

import pytest
import torch
from helpers.models.checkpoints import build
from helpers.runs.trace_file import trace_file

from csd.cli.main import main
from csd.research.draft_models.eagle import read_head

pytestmark = pytest.mark.quick


def test_a_head_is_trained_and_a_second_run_is_refused(tmp_path, capsys):
    build("llama").save_pretrained(tmp_path / "model")
    rows = [{"prompt_ids": [7, i], "samples": [[i, 5, i, 6, 9, 4]] * 2} for i in range(4)]
    traces = str(trace_file(tmp_path / "traces.jsonl", *rows))
    out = tmp_path / "head"
    command = [
        "train-head",
        str(tmp_path / "model"),
        traces,
        "-o",
        str(out),
        "--epochs",
        "3",
        "--held-out",
        "0.25",
        "--batch",
        "32",
        "--dtype",
        "bfloat16",
    ]
    assert main(command) == 0
    errors = capsys.readouterr().err
    last = json.loads((out / "curve.jsonl").read_text().splitlines()[-1])
    assert f"{last['step']} steps, {last['tokens']} tokens" in errors
    assert f"held-out acceptance {last['acceptance']:.3f}" in errors
    # the bar
    assert "loss=" in errors and "acceptance=" in errors
    head = read_head(out)
    assert (head.dtype, head.config.vocab, head.embedding) == (torch.bfloat16, 97, None)
    assert main([*command, "--quiet"]) == 2
    assert "out must be a folder without a head" in capsys.readouterr().err


def test_an_interrupted_command_prints_how_to_resume(tmp_path, capsys, monkeypatch):
    def stop(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("csd.research.training.command.train_head", stop)
    assert main(["train-head", "model", "traces", "-o", "out"]) == 130
    assert "run the same command again to continue from out" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train-head", "model", "traces"])
