"""A model split over two processes samples what it does in one, whatever rank 1's graph holds."""

import json
from pathlib import Path

import checkpoints
import pytest
import tensor_parallel_rank as script
import torch
import torch.distributed as dist

import csd

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, torchrun):
    folder = tmp_path_factory.mktemp("ranks")
    done = torchrun("tensor_parallel_rank.py", folder)
    files = [folder / f"{r}.json" for r in range(2)]
    assert all(f.exists() for f in files), done.stderr[-4000:]
    errors = [f.read_text() for f in sorted(folder.glob("*.error"))]
    return [json.loads(f.read_text()) for f in files], errors, done.stdout


def single(family, case, **options):
    engine = csd.Engine(script.build(family), max_slots=4)
    return script.draw(engine, case, **options)


@pytest.mark.parametrize(
    ("family", "case"),
    [*(("llama", c) for c in script.CASES), ("qwen2", "fixed"), ("qwen3", "fixed")],
)
def test_tokens_are_those_of_one_process(ranks, family, case):
    """float64; two prompts wait for slots, a prompt's pages and an uneven vocabulary are split."""
    found, _, _ = ranks
    here, there = (r[f"{family}-{case}"] for r in found)
    assert here == there
    expected = single(family, case)
    assert here["tokens"] == [r.tokens for r in expected]
    for ours, theirs in zip(here["logprobs"], expected, strict=True):
        for a, b in zip(ours, theirs.logprobs, strict=True):
            assert a == pytest.approx(b, abs=1e-9)
    if case == "fixed":
        assert here["proposed"] == sum(r.stats.nodes_proposed for r in expected)
        assert here["accepted"] == sum(r.stats.nodes_accepted for r in expected) > 0


def test_a_corrupted_graph_on_rank_1_changes_nothing(ranks):
    """Neither a token nor what is drafted: `proposed` and `accepted` are equal too."""
    (first, second), _, _ = ranks
    assert second["inserts"] > 10
    assert first["corrupted"] == second["corrupted"] == first["qwen3-fixed"]


def test_rank_0_decides_seed_and_stop(ranks):
    (first, second), _, _ = ranks
    assert first["led"] == second["led"]
    assert first["led"]["seeds"] == [5, 5, 5]
    expected = single("qwen3", "fixed", seed=5, until=lambda finished: len(finished) >= 2)
    assert [t[:2] for t in first["led"]["tokens"]] == [r.tokens[:2] for r in expected]
    assert first["drawn-seed"] == second["drawn-seed"]


def test_ranks_that_disagree_say_so(ranks):
    _, errors, _ = ranks
    assert any("rank 1 and rank 0 disagree about what has been committed" in e for e in errors)


def test_the_example(ranks):
    _, _, printed = ranks
    assert printed.count("\n---\n") == 1 and "2 ranks" in printed


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_cannot_be_split_is_refused(alone, monkeypatch):
    from torch.distributed.device_mesh import DeviceMesh

    from csd.integrations.tensor_parallel import ParallelEngine

    monkeypatch.setattr(DeviceMesh, "size", lambda self, dim=None: 3)
    with pytest.raises(ValueError, match="heads=4 cannot be split over 3 ranks"):
        ParallelEngine(checkpoints.build("llama"))
    monkeypatch.undo()
    engine = ParallelEngine(checkpoints.build("llama", dtype=torch.float64))
    with pytest.raises(NotImplementedError, match="verifier='kseq'"):
        next(engine.run([], verifier="kseq"))
    # a mesh of one process is the plain engine
    whole = csd.Engine(checkpoints.build("llama", dtype=torch.float64))
    options = dict(num_samples=3, max_new_tokens=20, seed=1, budget=8, temperature=1.0)
    tokens = [csd.generate(e, [3, 5], **options).tokens for e in (engine, whole)]
    assert tokens[0] == tokens[1]
