"""Trace files, and the line that shows progress."""

import io
import json

import torch
from scripted import PrefixSum, engine

import csd


def test_traces_hold_the_samples_and_the_targets_top(tmp_path):
    model = PrefixSum(sharpness=2.0)
    path = tmp_path / "traces.jsonl"
    out = csd.generate(
        engine(model, max_slots=2), [[1, 2], [3]], num_samples=3, max_new_tokens=15, seed=1,
        temperature=0.7, budget=8, record=path,
    )  # fmt: skip
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["prompt_ids"] for r in rows] == [[1, 2], [3]]
    for row, result in zip(rows, out, strict=True):
        assert row["temperature"] == 0.7
        assert row["samples"] == result.tokens
        for tokens, top in zip(row["samples"], row["top"], strict=True):
            assert len(top) == len(tokens)
            for i, (ids, probs) in enumerate(top):
                p = (model.next_logits(row["prompt_ids"] + tokens[:i]) / 0.7).softmax(0)
                best = p.topk(8)
                assert ids == best.indices.tolist()
                assert torch.allclose(torch.tensor(probs).double(), best.values, atol=1e-6)


def test_progress_counts_samples_and_tokens(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr("sys.stderr", out)
    csd.generate(
        engine(PrefixSum(sharpness=2.0)), [1], num_samples=2, max_new_tokens=5, progress=True
    )
    last = out.getvalue().splitlines()[-1]
    assert "2/2" in last and "tokens=10" in last
    assert out.getvalue().endswith("\n")
