"""Drafts from the paper's graph in layers: against the host's, and the kernels by the reference."""

import math
import random

import pytest
import torch
from helpers.checks.equal_fields import assert_equal_fields
from text_cases import random_slots

from csd.graph.host_tree import HostTree
from csd.kernels.draft.paper.layered_dag import layered_dag, layered_dag_ref, layered_dag_triton
from csd.research.baselines.multi_sample_paper import Paper
from csd.state.pool import COST_ONE, PROGRESS_PENALTY, SIBLING
from csd.state.texts import CHANCE_ONE, Candidates, DagConfig

pytestmark = pytest.mark.compiled


def random_candidates(rng, slots, most, tokens, vocab=5, used=0.7):
    token = torch.full((slots, most, tokens), -1, dtype=torch.int32)
    chance = torch.zeros_like(token)
    for s in range(slots):
        for p in range(rng.choice([0, most, int(used * most)])):
            for i in range(rng.randint(1, tokens)):
                token[s, p, i] = rng.randrange(vocab)
                chance[s, p, i] = rng.choice([0, CHANCE_ONE, rng.randint(1, CHANCE_ONE)])
    return Candidates(token, chance)


CASES = [
    # seed, slots, candidates, tokens, extra rows, nodes, options
    (0, 1, 4, 3, 3, None, {}),
    (1, 3, 8, 16, 30, None, {}),
    (2, 3, 8, 5, 30, None, {"tree": True}),
    (3, 5, 64, 6, 60, None, {"tree": True}),
    (4, 4, 20, 8, 0, None, {"tree": True}),
    (5, 4, 20, 8, 12, 7, {"tree": True, "alpha": 0.0}),
    (6, 4, 7, 8, 40, None, {"tree": True, "alpha": 1.0, "frontier": 3}),
    (7, 2, 33, 16, 200, None, {"tree": True, "frontier": 8, "alpha": 0.3}),
    (8, 3, 1, 1, 3, None, {"alpha": 0.9}),
    (9, 19, 6, 4, 50, None, {"tree": True, "min_prob": 0.05}),
    (10, 4, 16, 9, 20, None, {"alpha": 1.0}),
]


def case(seed, count, most, tokens):
    rng = random.Random(seed)
    slots = random_slots(rng, count, 4, vocab=5)
    slots.live[rng.randrange(count)] = True
    slots.group[:] = slots.group.clamp(min=0)
    slots.max_new += 3
    if seed % 3 == 0:
        slots.progress_penalty.fill_(PROGRESS_PENALTY)
    return random_candidates(rng, count, most, tokens), slots


@pytest.mark.parametrize("params", CASES, ids=str)
def test_equals_the_reference(poison, params):
    seed, count, most, tokens, extra, nodes, options = params
    candidates, slots = case(seed, count, most, tokens)
    rows, config = int(slots.live.sum()) + extra, DagConfig(**options)
    want = layered_dag_ref(candidates, slots, rows, config, nodes)
    assert_equal_fields(layered_dag_triton(candidates, slots, rows, config, nodes), want)
    assert_equal_fields(layered_dag(candidates, slots, rows, config, nodes), want)


def test_the_cases_draft_deep_and_wide():
    depth, widest = [], 0
    for seed, count, most, tokens, extra, nodes, options in CASES:
        candidates, slots = case(seed, count, most, tokens)
        rows = int(slots.live.sum()) + extra
        pool = layered_dag_ref(candidates, slots, rows, DagConfig(**options), nodes)
        depth.append(int(pool.depth.max()))
        widest = max(widest, int(pool.slot_nodes.max()))
    assert 0 in depth and max(depth) > 6 and widest > 30


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("tree", [False, True])
def test_the_chain_and_the_tree_are_the_host_drafters(tree, alpha):
    """Candidates with probabilities that both write alike; the same tokens in the same order."""
    compared = 0
    for seed in range(40):
        rng = random.Random(seed)
        slots = random_slots(rng, 1, 4, live=1)
        slots.stop_ids.fill_(-1)
        slots.generated.zero_()
        slots.max_new.fill_(30)
        candidates = random_candidates(rng, 1, 12, 6, vocab=9)
        # as many as the tree's frontier leaves to the best first search, too
        depth = 6 if not tree else 2
        candidates = Candidates(*(x[:, :, :depth].contiguous() for x in candidates))
        n = int((candidates.token[0, :, 0] >= 0).sum())
        config = DagConfig(tree=tree, alpha=alpha, frontier=8)
        pool = layered_dag_ref(candidates, slots, 9, config)
        host = HostTree(8, depth)
        token = candidates.token[0, :n].numpy().astype("int64")
        chance = candidates.chance[0, :n].numpy() / CHANCE_ONE
        Paper(tree=tree, alpha=alpha)._extract(token, chance, host)
        # an edge of weight 0 is followed by the host alone
        wanted = [i for i, p in enumerate(host.probability) if p > 2**-23]
        got = pool.token[1 : pool.slot_nodes[0]].tolist()
        if not tree:
            assert got == [host.token[i] for i in wanted][: len(got)]
            assert len(got) >= min(len(wanted), 8) - 1
        costs = sorted(round(-math.log2(host.probability[i]) * COST_ONE) for i in wanted)
        for ours, theirs in zip(sorted(pool.cost[1 : 1 + len(got)].tolist()), costs, strict=False):
            assert abs(ours - theirs) <= 8
        compared += len(got)
        assert (pool.source[1 : 1 + len(got)] == SIBLING).all()
    assert compared > 40


def test_equal_tokens_of_a_layer_are_one_node():
    """80 follows two tokens; what follows it counts candidates of both."""
    siblings = [[60, 80, 1], [60, 80, 2], [61, 80, 2], [60, 81, 3]]
    token = torch.tensor([siblings], dtype=torch.int32)
    slots = random_slots(random.Random(0), 1, 4, live=1)
    slots.stop_ids.fill_(-1)
    slots.generated.zero_()
    slots.max_new.fill_(30)
    candidates = Candidates(token, torch.full_like(token, CHANCE_ONE // 2))
    pool = layered_dag_ref(candidates, slots, 8, DagConfig())
    assert pool.token[1:4].tolist() == [60, 80, 2]
    # .5 * .5 + .5 * (3/4, 2/3, 2/3)
    weights = [0.625, 0.25 + 1 / 3, 0.25 + 1 / 3]
    want = [-sum(map(math.log2, weights[: i + 1])) * COST_ONE for i in range(3)]
    assert pool.cost[1:4].tolist() == pytest.approx(want, abs=2)
    # a token that ends the sample is not drafted, nor what is behind it
    slots.stop_ids[0, 0] = 80
    assert layered_dag_ref(candidates, slots, 8, DagConfig()).slot_nodes[0] == 2


def test_what_it_refuses():
    candidates, slots = case(1, 3, 8, 16)
    with pytest.raises(ValueError, match="rows must be at least 1, got 0"):
        layered_dag(candidates, slots, 0, DagConfig())
    with pytest.raises(ValueError, match=r"candidates.token must be torch.int32, got torch.int64"):
        layered_dag(Candidates(candidates.token.long(), candidates.chance), slots, 9, DagConfig())
    wide = Candidates(*(torch.zeros(3, 300, 16, dtype=torch.int32) for _ in range(2)))
    with pytest.raises(ValueError, match="candidates must be at most 256 of 16 tokens, got 300"):
        layered_dag(wide, slots, 9, DagConfig())
    for options, message in (
        ({"k": 0}, "k must be from 1 to 16, got 0"),
        ({"edits": 4}, "edits must be from 0 to 3, got 4"),
        ({"alpha": 1.5}, "alpha must be from 0 to 1, got 1.5"),
        ({"tokens": 17}, "tokens must be from 1 to 16, got 17"),
    ):
        with pytest.raises(ValueError, match=message):
            DagConfig(**options)
