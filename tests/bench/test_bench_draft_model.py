"""What `bench.draft_model` measures on a toy, and docs/draft_models.md's tables."""

import json
from argparse import Namespace
from pathlib import Path

import csd
from bench import draft_model
from csd.models.demo import toy

ROOT = Path(__file__).parents[2]


def test_the_page_shows_what_was_measured():
    """`python -m bench.draft_model --table bench/results/draft_model.json`, table by table."""
    shown = (ROOT / "docs/draft_models.md").read_text()
    found = draft_model.tables(json.loads((ROOT / "bench/results/draft_model.json").read_text()))
    assert len(found) == 2
    for table in found:
        assert table in shown


def test_every_run_commits_what_was_asked_for():
    model, tokenizer = toy()
    args = Namespace(
        prompts=1, samples=2, tokens=12, nodes=4, k=2, drafts=["first-1"],
        verifiers=["single", "kseq", "recursive"],
    )  # fmt: skip
    with csd.Engine(model, tokenizer=tokenizer) as engine:
        parts = {"pool": draft_model.pool, "sequences": draft_model.sequences}
        result = {name: measure(engine, args) for name, measure in parts.items()}
    kinds = [r["drafter"] for r in result["pool"]]
    assert kinds == ["consensus", "first-1", "consensus+first-1"]
    ran = [(r["verifier"], r["K"], r["laws"]) for r in result["sequences"]]
    assert ran == [
        ("single", 1, "one"), ("kseq", 2, "one"), ("recursive", 2, "one"), ("kseq", 4, "one"),
        ("recursive", 4, "one"), ("recursive", 2, "at 1.2 and 1.0"),
    ]  # fmt: skip
    for r in [*result["pool"], *result["sequences"]]:
        assert sum(r["tokens"]) >= sum(r["steps"]) > 0
        assert 0 < r["draft_seconds"] < r["seconds"]
    # same samples under match, whatever drafts
    assert len({tuple(r["tokens"]) for r in result["pool"]}) == 1
    pool, sequences = draft_model.tables(result)
    assert pool.count("\n") == 4 and sequences.count("\n") == 7
