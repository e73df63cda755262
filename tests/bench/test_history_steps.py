"""`python -m bench.history_steps` with a toy in place of the model."""

import json

import pytest
import torch

from bench import history_steps
from csd.models.demo import toy
from csd.traces.traces import Trace


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(history_steps, "load", toy)
    return ["--prompts", "2", "--samples", "2", "--tokens", "10", "--steps", "1", "2"]


def test_weights_that_stay_need_no_new_history(small, tmp_path, capsys):
    out = tmp_path / "out.json"
    history_steps.main([*small, "--rates", "0", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [r["steps"] for r in rows] == [0, 1, 2]
    for row in rows:
        assert row["tokens as at step 0"] == 1
        assert row["of step 0"] == row["of these weights"] == rows[0]["of step 0"]
        assert row["none"] == rows[0]["none"] < row["of step 0"]
    # a file is completed, and a rate that is asked for again is drawn again
    history_steps.main([*small, "--rates", "0.1", "--json", str(out)])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(r["rate"], r["steps"]) for r in rows] == [(r, k) for r in (0, 0.1) for k in (0, 1, 2)]
    moved = rows[3:]
    # at such a rate two draws with one seed part at their start
    assert moved[0] | {"rate": 0} == rows[0]
    assert moved[1]["tokens as at step 0"] < 0.5


def test_a_step_raises_what_was_rewarded(small, monkeypatch):
    args = type("Args", (), {"prompts": 1, "samples": 4, "tokens": 12})
    model, tokenizer = toy()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    drawn = {}
    generate = history_steps.csd.generate

    def watched(*given, **options):
        drawn["out"] = generate(*given, **options)
        return drawn["out"]

    monkeypatch.setattr(history_steps.csd, "generate", watched)

    def logprob(tokens):
        prompt = drawn["out"].prompt_ids
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)].mean()

    before = {k: v.clone() for k, v in model.state_dict().items()}
    history_steps.learn(model, optimiser, tokenizer, 0, args)
    out = drawn["out"]
    rewards = [history_steps.share_of_vowels(t) for t in out.texts]
    assert max(rewards) > min(rewards)
    best, worst = (out.tokens[rewards.index(f(rewards))] for f in (max, min))
    after = logprob(best) - logprob(worst)
    model.load_state_dict(before)
    assert after > logprob(best) - logprob(worst)


def test_equal_tokens_count_to_where_draws_part():
    a = [Trace(0, [1], [[1, 2, 3, 4], [5, 6]], 0.7, None)]
    b = [Trace(0, [1], [[1, 2, 9, 4], [5, 6]], 0.7, None)]
    assert history_steps.same(a, a) == 1 and history_steps.same(a, b) == 4 / 6
