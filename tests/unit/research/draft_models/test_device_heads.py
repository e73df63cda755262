"""Heads whose steps never read the device: the host drafter's trees, in fixed shapes."""

import pytest
import torch
from helpers.checks.host_reads import NoHostReads
from helpers.models.checkpoints import VOCAB, build
from helpers.models.eagle_heads import write
from helpers.runs.tiny_steps import CONFIG, step_with
from helpers.targets import few

import csd
from csd.engine.step.budget import Budget
from csd.engine.step.budget.fixed import FixedPool
from csd.research.draft_models.device_drafter import DeviceModelDrafter
from csd.research.draft_models.eagle import read_head

PROMPT = [5, 17, 3, 60, 17, 3, 9]


def on_device(folder, **options):
    """`drafter=`: what `csd.Eagle` makes on a CPU, and on a GPU."""
    asked = csd.Eagle(folder, **options)

    def make(ops, device):
        net = asked.make(ops, device).net
        return DeviceModelDrafter(net, ops, device, k=asked.k, depth=asked.depth)

    return asked, make


def drafts(out):
    return [[(d.at, d.tokens, d.parents, d.path) for d in s.drafts] for r in out for s in r]


@pytest.fixture(scope="module")
def target():
    return build("llama", dtype=torch.float64, num_hidden_layers=6)


def head_of(version, target, folder):
    write(folder, version, target.config.hidden_size, VOCAB, draft_vocab=40)


@few(1)
@pytest.mark.parametrize(
    ("k", "depth", "budget", "chunk"), [(1, 3, 5, 512), (3, 4, 60, 2), (2, 16, 90, 2)]
)
@pytest.mark.parametrize("version", [1, 3])
def test_trees_are_the_host_drafters(version, k, depth, budget, chunk, target, tmp_path):
    """Prompts of one token and more, more samples than slots, filters and ends."""
    head_of(version, target, tmp_path)
    asked = dict(
        num_samples=3,
        max_new_tokens=14,
        seed=7,
        temperature=0.9,
        top_k=30,
        top_p=0.95,
        stop_token_ids=[7, 30],
        budget=budget,
        drafts=True,
    )
    runs = []
    for make in on_device(tmp_path, k=k, depth=depth):
        with csd.Engine(target, max_slots=4, prefill_chunk=chunk) as e:
            # of one prompt after another: of several, equal costs have another order there
            asking = [PROMPT, [5], PROMPT[:2]]
            runs.append([e.generate(prompt, drafter=make, **asked) for prompt in asking])
    host, device = runs
    assert sum(r.stats.nodes_proposed for r in host) > 50
    assert drafts(host) == drafts(device)
    assert [r.tokens for r in host] == [r.tokens for r in device]


@few(1)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("pause", [2, 5, 9])
def test_steps_without_drafts_lose_no_state(static, pause, target, tmp_path, monkeypatch):
    """Drafts after a pause are those of the host's drafter, which keeps all states."""
    head_of(1, target, tmp_path)
    asked, real = [0], Budget.num_draft_tokens

    def ask(budget, live):
        asked[0] += 1
        return 0 if asked[0] % pause else real(budget, live)

    pool = FixedPool.pool_shape

    def of_fixed_shape(budget, live):
        asked[0] += 1
        rows, nodes = pool(budget, live)
        return rows, 0 if asked[0] % pause else nodes

    monkeypatch.setattr(Budget, "num_draft_tokens", ask)
    monkeypatch.setattr(FixedPool, "pool_shape", of_fixed_shape)
    options = dict(
        num_samples=2,
        max_new_tokens=40,
        seed=3,
        temperature=1.0,
        drafts=True,
        budget=20,
        ignore_eos=True,
    )
    runs = []
    for way, make in enumerate(on_device(tmp_path, k=2, depth=3)):
        asked[0] = 0
        with csd.Engine(target, max_slots=4, static=bool(way) and static) as e:
            runs.append(e.generate([PROMPT], drafter=make, **options))
    host, device = runs
    assert sum(r.stats.nodes_proposed for r in host) > 20
    assert drafts(host) == drafts(device)


@pytest.mark.parametrize("nodes", [0, 13])
def test_nothing_reads_the_device(nodes, tmp_path):
    write(tmp_path, 1, CONFIG.hidden, CONFIG.vocab)

    def make(ops, device):
        head = read_head(tmp_path, dtype=torch.float32)
        drafter = DeviceModelDrafter(head, ops, device, k=2, depth=3)
        # of the prompt, which no step reads here
        drafter.observe_hidden(torch.zeros(7, CONFIG.hidden))
        return drafter

    step = step_with(make)
    with NoHostReads():
        pendings = [step.start(16, nodes, [None] * 3, i) for i in range(6)]
    records = [p.read() for p in pendings]
    assert all(count >= 1 for r in records for count in r.count)
    assert any(r.costs for r in records) == bool(nodes)
