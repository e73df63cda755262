"""A model split over two processes samples what it does in one, whatever rank 1's graph holds."""

import json
from pathlib import Path

import pytest
import tensor_parallel_rank as script
import torch
import torch.distributed as dist
from helpers.models import checkpoints
from helpers.targets import slow

import csd
from csd.engine.call import RunSettings

# two processes
pytestmark = slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, torchrun):
    # the loops that both ranks would compile at once
    single("llama", "fixed")
    folder = tmp_path_factory.mktemp("ranks")
    done = torchrun(Path(__file__).with_name("tensor_parallel_rank.py"), folder)
    files = [folder / f"{r}.json" for r in range(2)]
    assert all(f.exists() for f in files), done.stderr[-4000:]
    return [json.loads(f.read_text()) for f in files], done.stdout


def single(family, case, **options):
    # ranks share no rows, so that the counts of drafted nodes are those of roots of their own
    engine = csd.Engine(script.build(family), max_slots=4, share_rows=False)
    return script.draw(engine, case, **options)


@pytest.mark.parametrize(
    ("family", "case"),
    [*(("llama", c) for c in script.CASES), *((f, "fixed") for f in script.SIZES if f != "llama")],
)
def test_tokens_are_those_of_one_process(ranks, family, case):
    """float64; two prompts wait for slots, a prompt's pages and an uneven vocabulary are split."""
    found, _ = ranks
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
    (first, second), _ = ranks
    assert second["inserts"] > 10
    assert first["corrupted"] == second["corrupted"] == first["qwen3-fixed"]


def test_ranks_time_the_same_steps(ranks):
    """Clocks of ranks differ, but a pass that another rank leaves out would never end."""
    (first, second), _ = ranks
    assert first["timed-apart"] == second["timed-apart"]
    assert first["timed-apart"] == [r.tokens for r in single("qwen3", "auto")]


def test_rank_0_decides_seed_and_stop(ranks):
    (first, second), _ = ranks
    assert first["led"] == second["led"]
    assert first["led"]["seeds"] == [5, 5, 5]
    expected = single("qwen3", "fixed", seed=5, until=lambda finished: len(finished) >= 2)
    assert [t[:2] for t in first["led"]["tokens"]] == [r.tokens[:2] for r in expected]
    assert first["drawn-seed"] == second["drawn-seed"]


FULL, SAME = "MemoryError: full", "must be the same on all ranks"


def other(rank, what=FULL):
    return f"RuntimeError: rank {rank} failed: {what}"


DISAGREE = "RuntimeError: rank 1 and rank 0 have committed different tokens"
# what ranks 0 and 1 raise
FAILURES = {
    "temperature": (f"ValueError: temperature {SAME}, got 0.9 on rank 0 and 0.5 on rank 1",) * 2,
    "samples": (f"ValueError: num_samples {SAME}, got 4 on rank 0 and 2 on rank 1",) * 2,
    "prompts": (f"ValueError: the prompts' checksum {SAME}, got ",) * 2,
    "refused": (
        "RuntimeError: rank 1 refused the call: ValueError: top_p must",
        "ValueError: top_p must",
    ),
    "refused by both": ("ValueError: top_p must",) * 2,
    "prompt on 0": (FULL, other(0)),
    "prompt on 1": (other(1), FULL),
    "pass on 0": (FULL, other(0)),
    "pass on 1": (other(1), FULL),
    "pass on both": (FULL, FULL),
    "commit on 1": (other(1), FULL),
    "last commit on 1": (other(1), FULL),
    "caches on 1": (other(1), FULL),
    "callback": ("KeyError: 'x'", other(0, "KeyError: 'x'")),
    "disagree": (other(1, DISAGREE), DISAGREE),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_rank_that_fails_fails_all_and_the_next_call_goes_on(ranks, name):
    found, _ = ranks
    for rank, (here, want) in enumerate(zip(found, FAILURES[name], strict=True)):
        error, next_is_right = here["failures"][name]
        assert error is not None and error.startswith(want), rank
        assert next_is_right, rank


def test_every_fault_is_looked_at(ranks):
    found, _ = ranks
    assert [*found[0]["failures"]] == [*found[1]["failures"]] == [*FAILURES]


def test_the_example(ranks):
    _, printed = ranks
    assert printed.count("\n---\n") == 1 and "2 ranks" in printed


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_unsplittable_models_are_refused(alone, monkeypatch):
    from torch.distributed.device_mesh import DeviceMesh

    from csd.integrations.tensor_parallel import ParallelEngine

    monkeypatch.setattr(DeviceMesh, "size", lambda self, dim=None: 3)
    with pytest.raises(ValueError, match="heads=4 cannot be divided evenly among 3 ranks"):
        ParallelEngine(checkpoints.build("llama"))
    monkeypatch.undo()
    engine = ParallelEngine(checkpoints.build("llama", dtype=torch.float64))
    with pytest.raises(NotImplementedError, match=r"verifier must .* got 'kseq'"):
        next(engine.run([], RunSettings(verifier="kseq")))
    # a mesh of one process is the plain engine
    whole = csd.Engine(checkpoints.build("llama", dtype=torch.float64))
    options = dict(num_samples=3, max_new_tokens=20, seed=1, budget=8, temperature=1.0)
    tokens = [csd.generate(e, [3, 5], **options).tokens for e in (engine, whole)]
    assert tokens[0] == tokens[1]
