"""A head of EAGLE-3 that is trained drafts what it has learnt, in chains of its own states."""

import json

import pytest
import torch
from helpers.models.checkpoints import VOCAB, build
from safetensors.torch import load_file
from training_runs import recorded, tau_of

import csd
from csd.research.training import eagle3 as by_chains
from csd.research.training.texts import draft_tokens, read_texts

# samples of which the next token is likely
LIKELY = dict(temperature=0.3)
LEARNT = dict(eagle=3, batch=64, learning_rate=2e-2, held_out=0)


@pytest.fixture(scope="module")
def target():
    return build("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def traces(target, tmp_path_factory):
    return recorded(target, tmp_path_factory.mktemp("traces") / "traces.jsonl", **LIKELY)


def test_a_head_drafts_what_it_has_learnt(target, traces, tmp_path):
    """In chains, unless it never reads its own states while it learns."""
    tau = {}
    for name, epochs, depth in (("first", 1, 3), ("pairs", 28, 1), ("chains", 28, 3)):
        csd.train_head(target, traces, tmp_path / name, epochs=epochs, depth=depth, **LEARNT)
        tau[name] = tau_of(target, tmp_path / name, **LIKELY)
    assert tau["first"] < 1.5 and tau["pairs"] < 2.3 and tau["chains"] > 2.6, tau
    settings = json.loads((tmp_path / "chains" / "config.json").read_text())
    assert settings["draft_vocab_size"] == settings["vocab_size"] == VOCAB


def test_a_smaller_vocabulary_is_that_of_the_texts_that_are_learnt(
    target, traces, tmp_path, monkeypatch
):
    seen = []

    def spied(learnt, *sizes):
        seen.append(learnt)
        return draft_tokens(learnt, *sizes)

    monkeypatch.setattr(by_chains, "draft_tokens", spied)
    curve = csd.train_head(
        target,
        traces,
        tmp_path / "head",
        eagle=3,
        epochs=4,
        batch=64,
        draft_vocab=40,
        every=2,
        held_out=0.3,
        learning_rate=1e-2,
        decay=0.5,
        dtype=torch.bfloat16,
    )
    # one prompt of three is held out
    prompts = read_texts([traces], VOCAB, 64)
    assert len(seen[0]) == sum(map(len, prompts)) - 2
    weights = load_file(tmp_path / "head" / "model.safetensors")
    token = weights["d2t"] + torch.arange(40)
    assert token.equal(draft_tokens(seen[0], VOCAB, 40, torch.device("cpu")))
    assert weights["t2d"].nonzero().flatten().equal(token)
    assert weights["lm_head.weight"].dtype == torch.bfloat16
    for row in curve:
        assert row["acceptance"] == row["by_step"][0] and len(row["by_step"]) == 5
    assert curve[-1]["loss"] < curve[0]["loss"]
    assert tau_of(target, tmp_path / "head", **LIKELY) >= 1


def test_a_model_of_few_layers_is_refused(traces, tmp_path):
    with pytest.raises(ValueError, match="model must have at least 4 layers for eagle=3, got 3"):
        csd.train_head(build("llama", num_hidden_layers=3), traces, tmp_path / "out", eagle=3)
    assert not (tmp_path / "out").exists()
    model = build("qwen3", num_hidden_layers=5, tied=True)
    csd.train_head(model, traces, tmp_path / "out", eagle=3, epochs=1, depth=2, held_out=0)
    assert tau_of(model, tmp_path / "out") >= 1
