"""Samples that are behind get more of a step's nodes while no sample waits for a slot."""

import random
from dataclasses import replace

import pytest
import torch
from helpers.kernels.draft_cases import CONFIG, equal_slots, random_graph, random_slots

import csd
from bench.lib.shapes import random_model
from csd.engine.step.static_step import StaticStep
from csd.kernels.draft import draft_tree_ref
from csd.state.pool import MAX_PROGRESS_PENALTY, PROGRESS_PENALTY
from csd.state.pool_builder import progress_penalties


def test_penalties_count_from_the_last_live_slot():
    slots = random_slots(random.Random(0), 4, live=True)
    slots.generated[:] = torch.tensor([7, 3, 5, 1000])
    slots.live[1] = False
    slots.progress_penalty[:] = PROGRESS_PENALTY
    found = progress_penalties(slots)[[0, 2, 3]].tolist()
    assert found == [2 * PROGRESS_PENALTY, 0, MAX_PROGRESS_PENALTY]
    slots.progress_penalty[:] = 0
    assert not progress_penalties(slots).any()


def test_last_of_equal_samples_gets_most_nodes():
    config = replace(CONFIG, group_penalty=0)
    rng = random.Random(1)
    graph, slots = random_graph(rng, groups=(11,)).table(), equal_slots(rng, 3)
    slots.group[:], slots.group_key[0] = 0, 11
    slots.generated[:], slots.max_new[:] = torch.tensor([20, 0, 10]), 99
    nodes = {}
    costs = set(draft_tree_ref(graph, slots, 3 + 60, config).cost.tolist())
    for progress_penalty in (0, PROGRESS_PENALTY):
        slots.progress_penalty[:] = progress_penalty
        pool = draft_tree_ref(graph, slots, 3 + 18, config)
        nodes[progress_penalty] = (pool.slot_nodes - 1).tolist()
        # a node's cost is its path's probability, without its slot's progress penalty
        assert set(pool.cost.tolist()) <= costs
    assert nodes[0] == [6, 6, 6]
    assert nodes[PROGRESS_PENALTY][1] > nodes[PROGRESS_PENALTY][2] > nodes[PROGRESS_PENALTY][0]
    assert sum(nodes[PROGRESS_PENALTY]) == 18


def test_last_sample_of_one_prompt_gets_most_nodes_without_noise():
    # one level cost for all
    even, rng = replace(CONFIG, settle=0), random.Random(1)
    graph, slots = random_graph(rng, groups=(11, 12)).table(), equal_slots(rng, 4)
    slots.group[:], slots.step[:], slots.progress_penalty[:] = 0, 4, 0
    slots.group_key[:2], slots.max_new[:] = torch.tensor([11, 12]), 99
    slots.generated[:], slots.live[3] = torch.tensor([20, 4, 10, 0]), False

    def nodes(config=even):
        return (draft_tree_ref(graph, slots, 3 + 18, config).slot_nodes - 1)[:3].tolist()

    first, last, middle = nodes()
    assert last > middle > first
    as_ever = nodes(replace(even, group_penalty=0))
    assert as_ever == [6, 6, 6]
    # samples that began in other steps say nothing
    slots.step[:3] = torch.tensor([4, 1, 2])
    assert nodes() == as_ever
    # nor does anything where noise decides, or where there are two prompts
    slots.step[:], slots.temperature[:] = 4, 0.7
    assert nodes() == nodes(replace(even, group_penalty=0))
    slots.temperature[:], slots.group[2] = 0, 1
    assert nodes() == nodes(replace(even, group_penalty=0))


@pytest.mark.parametrize("prompts", [1, 3])
def test_applies_only_while_no_sample_waits(prompts, monkeypatch):
    seen = []
    launch = StaticStep.launch

    def watched(step, *args):
        (progress_penalty,) = step.slots.progress_penalty.unique().tolist()
        seen.append(progress_penalty)
        return launch(step, *args)

    monkeypatch.setattr(StaticStep, "launch", watched)
    options = dict(num_samples=4, max_new_tokens=6, seed=1, temperature=1.0, budget=8)
    asked = [[5, 6, 7 + i] for i in range(prompts)]
    model = random_model("tiny", dtype=torch.float64)
    outs = []
    for static in (True, False):
        with csd.Engine(model, max_slots=4, static=static) as engine:
            for _ in range(2):
                del seen[:]
                outs.append([x.tokens for x in engine.generate(asked, **options)])
                if static:
                    # once the last sample has its slot, to the end
                    turn = seen.index(PROGRESS_PENALTY)
                    assert set(seen[:turn]) == ({0} if prompts > 1 else set())
                    assert set(seen[turn:]) == {PROGRESS_PENALTY}
    assert all(out == outs[0] for out in outs)
