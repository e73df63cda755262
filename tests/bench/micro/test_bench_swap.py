"""The benchmark of swapped kernels, at a tiny size."""

import json

import pytest

from bench.lib import step_pass
from bench.micro import swap

pytestmark = pytest.mark.bench


def test_rows_of_both_jobs(monkeypatch, tmp_path, capsys):
    tiny = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    monkeypatch.setattr(swap, "SHAPE", step_pass.SHAPE | tiny)
    path = tmp_path / "swap.json"
    swap.main(["--tokens", "6", "--layers", "1", "--rounds", "2", "--eager", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [(row["job"], row["code"]) for row in rows] == [
        ("training", "eager"),
        ("decoding", "eager"),
    ]
    assert all(row["stock / csd"] > 0 for row in rows)
