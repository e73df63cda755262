"""Trace files, and the line that shows progress."""

import io
import json

import pytest
import torch
from helpers.models.scripted import PrefixSum, engine

import csd


def test_traces_hold_the_samples_and_the_targets_top(tmp_path):
    model = PrefixSum(sharpness=2.0)
    path = tmp_path / "traces.jsonl"
    out = csd.generate(
        engine(model, max_slots=2),
        [[1, 2], [3]],
        num_samples=3,
        max_new_tokens=15,
        seed=1,
        temperature=0.7,
        budget=8,
        record=path,
    )
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
    assert "10.0/10.0" in last and "samples=2/2" in last
    assert out.getvalue().endswith("\n")


@pytest.mark.parametrize("progress, shown", [(None, True), (True, True), (False, False)])
def test_progress_is_shown_on_a_terminal(monkeypatch, progress, shown):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    monkeypatch.setattr("sys.stderr", out)
    csd.generate(engine(PrefixSum()), [1], max_new_tokens=3, progress=progress)
    assert bool(out.getvalue()) == shown


def test_the_bar_counts_what_is_still_to_come(monkeypatch):
    """A sample that ends early has fewer tokens than it could have had."""
    bars = []
    monkeypatch.setattr("csd.engine.call.tqdm", lambda **more: bars.append(Bar(more)) or bars[0])

    class Bar:
        def __init__(self, options):
            self.total, self.n, self.seen = options["total"], 0, []

        def update(self, more):
            self.n += more
            self.seen.append((self.n, self.total))

        def set_postfix(self, *args, **kwargs):
            pass

        refresh = close = lambda self: None

    out = csd.generate(
        engine(PrefixSum(sharpness=2.0)),
        [1],
        num_samples=4,
        max_new_tokens=40,
        seed=3,
        stop_token_ids=[2, 3],
        progress=True,
    )
    assert out.stats.tokens < 160 and len(bars) == 1
    assert bars[0].seen[-1] == (out.stats.tokens, out.stats.tokens)
    assert bars[0].seen[0][1] == 160
    assert all(n <= total for n, total in bars[0].seen)
