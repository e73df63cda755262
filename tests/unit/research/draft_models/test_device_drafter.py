"""A draft model whose steps never read the device: the host drafter's trees, in fixed shapes."""

from dataclasses import replace

import pytest
import torch
from helpers.checks.host_reads import NoHostReads
from helpers.models.checkpoints import build
from helpers.models.scripted import Letters, Near, PrefixSum, engine, loaded
from helpers.runs.tiny_steps import CONFIG, OneDevice, step_with
from helpers.targets import few, slow

import csd
from bench.lib.shapes import random_model
from csd.engine.step.budget import Budget
from csd.kernels.attention import prompt as prompt_rows
from csd.research.draft_models.device_drafter import DeviceModelDrafter
from csd.research.draft_models.draft_model import ModelNetwork

PROMPTS = ["abcabc", "xyz", "q"]


def on_device(model, **options):
    """`drafter=`: what `csd.DraftModel` makes on a GPU."""
    asked = csd.DraftModel(model, **options)

    def make(ops, device):
        host = asked.make(ops, device)
        return DeviceModelDrafter(
            host.net, ops, device, k=asked.k, depth=asked.depth, temperature=asked.temperature
        )

    return asked, make


def drafts(out):
    return [[(d.at, d.tokens, d.parents, d.path) for d in s.drafts] for s in out]


@few(2)
@pytest.mark.parametrize(
    ("k", "depth", "budget"), [(1, 4, 5), (3, 2, 40), (4, 5, 24), (2, 16, 200), (8, 9, 250)]
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_trees_are_the_host_drafters(family, k, depth, budget):
    """More samples than slots, filters and ends; in float64, where no tie is broken otherwise."""
    model = build(family, dtype=torch.float64)
    asked = dict(
        num_samples=5,
        max_new_tokens=18,
        seed=7,
        temperature=0.9,
        top_k=30,
        top_p=0.95,
        stop_token_ids=[7, 30],
        budget=budget,
        drafts=True,
    )
    small = build(family, dtype=torch.float64, seed=1)
    runs = []
    for make in on_device(small, layers=1, k=k, depth=depth):
        with csd.Engine(model, max_slots=3) as e:
            runs.append(e.generate([5, 17, 3, 60, 17, 3, 9], drafter=make, **asked))
    host, device = runs
    assert host.stats.nodes_proposed > 0
    assert drafts(host) == drafts(device)
    assert host.tokens == device.tokens


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_a_draft_model_of_a_shorter_context(device):
    """Its tables of positions end before the sample does."""
    config = replace(CONFIG, context=20)
    small = random_model(config, dtype=torch.float64, seed=1)
    make = on_device(small, k=2, depth=4)[device]
    asked = dict(num_samples=3, max_new_tokens=22, seed=1, temperature=1.0)
    with csd.Engine(random_model(CONFIG, dtype=torch.float64), max_slots=2) as e:
        out = e.generate([5, 17, 3], drafter=make, budget=20, **asked)
        assert out.tokens == e.generate([5, 17, 3], speculate=False, **asked).tokens
        assert out.stats.nodes_proposed > 0


@pytest.mark.parametrize("pause", [1, 2, 9])
def test_a_slot_catches_up_after_steps_without_drafts(pause, monkeypatch):
    """Nothing that the target itself drafts is rejected, wherever drafting paused. After a long
    pause a slot drafts nothing until all has been read."""
    count = [0]

    def ask(budget, live):
        count[0] += 1
        return 0 if count[0] % pause else budget.nodes

    monkeypatch.setattr(Budget, "num_draft_tokens", ask)
    e = engine(PrefixSum(), Letters(), max_slots=3)
    _, make = on_device(loaded(PrefixSum()), k=1, depth=3)
    new = 60 if pause == 9 else 40
    options = dict(num_samples=2, max_new_tokens=new, seed=3, temperature=1.0, budget=40)
    out = csd.generate(e, PROMPTS, drafter=make, **options)
    plain = csd.generate(e, PROMPTS, speculate=False, **options | {"budget": 0})
    assert [r.tokens for r in out] == [r.tokens for r in plain]
    for r in out:
        assert r.stats.nodes_accepted > 0
        # but for nodes beyond the last token
        assert r.stats.nodes_proposed - r.stats.nodes_accepted <= 2 * 3


@few(1)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("budget", [0, 12, "auto"])
def test_static_steps_draw_plain_samplings_tokens(static, budget):
    e = engine(PrefixSum(sharpness=8.0), Letters(), max_slots=4, static=static)
    _, make = on_device(loaded(Near()), k=2, depth=3)
    options = dict(num_samples=4, max_new_tokens=30, seed=1, temperature=0.7)
    plain = csd.generate(e, PROMPTS, speculate=False, **options)
    for _ in range(2):
        out = csd.generate(e, PROMPTS, drafter=make, budget=budget, **options)
        assert [r.tokens for r in out] == [r.tokens for r in plain]
        if budget == 12:
            assert sum(r.stats.accepted["model"] for r in out) > 0


@slow
def test_kernels_draft_like_the_references():
    model, found = build("llama"), []
    options = dict(num_samples=2, max_new_tokens=5, seed=2, temperature=0.7, budget=8, drafts=True)
    for kernels in ("reference", "triton"):
        e = csd.Engine(model, kernels=kernels, static=kernels == "triton")
        _, make = on_device(model, layers=1, k=2, depth=2)
        found.append(drafts(csd.generate(e, [5, 17, 3, 60], drafter=make, **options)))
    assert found[0] == found[1] and any(len(d[1]) > 1 for s in found[0] for d in s)


def drafting_step(device="cpu", **options):
    def make(ops, device):
        net = ModelNetwork(random_model(CONFIG, device, torch.float32, seed=1), torch.float32)
        return DeviceModelDrafter(net, ops, device, **dict(k=2, depth=3) | options)

    return step_with(make, device=device)


@pytest.mark.parametrize("nodes", [0, 13])
def test_nothing_reads_the_device(nodes):
    step = drafting_step()
    with NoHostReads():
        pendings = [step.start(16, nodes, [None] * 3, i) for i in range(6)]
    records = [p.read() for p in pendings]
    assert all(count >= 1 for r in records for count in r.count)
    assert any(r.costs for r in records) == bool(nodes)


def test_padding_changes_no_tree():
    pools = []
    for rows in (16, 32):
        step = drafting_step()
        for _ in range(5):
            _, pool, _ = step.body(rows, 9)
        pools.append(pool)
    used = int(pools[0].slot_nodes.sum())
    assert used > 3
    for name in ("token", "parent", "slot", "depth", "position", "ancestors", "cost", "context"):
        assert torch.equal(getattr(pools[0], name)[:used], getattr(pools[1], name)[:used])
    assert (pools[1].slot[used:] == -1).all() and (pools[1].token[used:] == -1).all()


def test_everything_lies_on_the_steps_device(monkeypatch):
    cpu = torch.Generator()
    monkeypatch.setattr(torch, "Generator", lambda device: cpu)
    # a prompt comes from the host
    monkeypatch.setattr(prompt_rows, "upload", lambda x, device: x.to(device))
    step = drafting_step("meta")
    with OneDevice():
        step.body(16, 9)
