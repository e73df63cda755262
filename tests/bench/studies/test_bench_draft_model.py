"""Measurements of `python -m bench draft_model` on a toy, and docs/draft_models.md's tables."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from helpers.models.checkpoints import build

import csd
from bench.studies.drafting import draft_model
from bench.studies.drafting.draft_model_tables import WORDS
from csd.models.demo import toy

pytestmark = pytest.mark.bench

ROOT = Path(__file__).parents[3]


def test_page_has_the_result_files_tables():
    """`python -m bench draft_model --table bench/results/draft_model.json`, table by table."""
    shown = (ROOT / "docs/draft_models.md").read_text()
    found = draft_model.tables(json.loads((ROOT / "bench/results/draft_model.json").read_text()))
    assert len(found) == 2
    for table in found:
        assert table in shown


@pytest.mark.parametrize("task", [WORDS, "code"])
def test_every_run_commits_all_requested_tokens(task):
    model, tokenizer = toy()
    args = Namespace(
        task=task,
        prompts=1,
        samples=2,
        tokens=12,
        nodes=4,
        k=2,
        drafts=["first-1"],
        verifiers=["single", "kseq", "recursive"],
    )
    with csd.Engine(model, tokenizer=tokenizer) as engine:
        parts = {"pool": draft_model.pool, "sequences": draft_model.sequences}
        result = {name: list(measure(engine, args)) for name, measure in parts.items()}
    kinds = [r["drafter"] for r in result["pool"]]
    assert kinds == ["consensus", "first-1", "consensus+first-1"]
    ran = [(r["verifier"], r["K"], r["laws"]) for r in result["sequences"]]
    assert (
        ran
        == [
            ("single", 1, "one"),
            ("kseq", 2, "one"),
            ("recursive", 2, "one"),
            ("kseq", 4, "one"),
            ("recursive", 4, "one"),
            ("single", 1, "all at 1.2"),
            ("kseq", 2, "all at 1.2"),
            ("recursive", 2, "all at 1.2"),
            ("recursive", 2, "at 1.2 and 1.0"),
        ][: 9 if task == WORDS else 5]
    )
    for r in [*result["pool"], *result["sequences"]]:
        assert sum(r["tokens"]) >= sum(r["steps"]) > 0
        assert 0 < r["draft_seconds"] < r["seconds"]
    assert {r["task"] for r in [*result["pool"], *result["sequences"]]} == {task}
    # same samples under match, whatever drafts
    assert len({tuple(r["tokens"]) for r in result["pool"]}) == 1
    pool, sequences = draft_model.tables(result)
    assert pool.count("\n") == 4 and sequences.count("\n") == 1 + len(ran)


@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("rounded", 4)])
def test_copies_are_rounded_row_by_row(name, bits, monkeypatch):
    """A copy differs from the model by half a step of each row's scale at most, and does differ."""
    model = build("llama")
    monkeypatch.setattr(draft_model, "read_model", lambda: build("llama"))
    copied = draft_model.copy_of.__wrapped__(name)
    steps = 0.0
    for weight, rounded in zip(model.parameters(), copied.parameters(), strict=True):
        if weight.ndim == 2 and weight is not model.get_input_embeddings().weight:
            step = weight.detach().abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
            off = ((weight - rounded).detach().abs() / step).max()
            steps = max(steps, float(off))
    assert 0.4 < steps < 0.5001


def test_a_copy_in_bfloat16_is_one(monkeypatch):
    monkeypatch.setattr(draft_model, "read_model", lambda: build("llama"))
    copied = draft_model.copy_of.__wrapped__("bfloat16")
    assert {w.dtype for w in copied.parameters()} == {torch.bfloat16}
