"""Trees of draws: which nodes are expanded, and what their draws depend on."""

import pytest
import torch
from helpers.runs.sampled_cases import graph, grow, state

from csd.engine.step.budget import AutoBudget, StepTimeTable
from csd.kernels.ops import reference
from csd.research.verify.multi_draft import MultiDraftVerifier
from csd.state.pool import MAX_NODES

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("nodes", [0, 2, 3, 31, 400])
def test_trees_take_all_draws_of_a_node_or_none(nodes):
    slots = state()
    pool, drawn = grow(slots, nodes)
    used = int((pool.slot >= 0).sum())
    assert used == int(pool.slot_nodes.sum()) == len(drawn.nodes) <= 3 + nodes
    # of slot 2's group the graph knows nothing
    assert pool.slot_nodes.tolist()[2:] == [1, 0]
    if nodes < 400:
        assert used - 3 == nodes // 3 * 3
    else:
        assert pool.slot_nodes[:2].tolist() == [MAX_NODES, MAX_NODES]
    children: dict[int, list[int]] = {}
    for row in range(used):
        start = drawn.start[int(pool.slot[row])]
        parent = int(pool.parent[row])
        word = 1 << (row - start)
        if parent >= 0:
            children.setdefault(parent, []).append(row)
            word |= int(pool.ancestors[parent]) & (2**64 - 1)
            assert pool.depth[row] == pool.depth[parent] + 1
            assert pool.position[row] == pool.position[parent] + 1
            assert pool.context[row].tolist() == [
                int(pool.token[row]),
                *pool.context[parent].tolist()[:-1],
            ]
        assert int(pool.ancestors[row]) & (2**64 - 1) == word
    for parent, rows in children.items():
        node = drawn.nodes[parent]
        assert len(rows) == 3
        assert pool.token[rows].tolist() == [node.successors.token[i] for i in node.drafts]
    # expanded in order of the path's probability: none that was left out is likelier, save equal
    # draws and slots that are full
    for s in (0, 1):
        rows = [r for r in range(used) if pool.slot[r] == s]
        costs = {True: [], False: []}
        for r in rows:
            node = drawn.nodes[r]
            first = all(
                drawn.nodes[c].token != node.token
                for c in children.get(int(pool.parent[r]), [])
                if c < r
            )
            if first and (node.successors is None or node.successors.token):
                costs[r in children].append(node.cost)
        if nodes == 31:
            assert max(costs[True]) <= min(costs[False])


def test_trees_keep_within_limits():
    slots = state()
    slots.max_new[0] = slots.generated[0] + 3
    slots.stop_ids[1, 0] = 1
    pool, drawn = grow(slots, 200)
    assert int(pool.depth[pool.slot == 0].max()) == 2
    assert 1 not in pool.token[(pool.slot == 1) & (pool.depth > 0)].tolist()
    assert 1 in pool.token[(pool.slot == 0) & (pool.depth > 0)].tolist()
    for node in drawn.nodes:
        if node.children:
            assert abs(node.successors.probs.sum() - 1) < 1e-12


def test_draws_depend_on_step_and_slot_alone():
    """The same words again; others in the next step and in another slot; none is shared."""
    first, _ = grow(state(), 90)
    again, _ = grow(state(), 90)
    assert torch.equal(first.token, again.token)
    later, _ = grow(state(step=1), 90)
    assert not torch.equal(first.token, later.token)
    slots = state()
    _, drawn = grow(slots, 90)
    words = [(n.slot, int(w)) for n in drawn.nodes if n.children for w in n.words]
    assert len(set(words)) == len(words)
    # one slot's draws are the same beside others, where there is room for all
    alone = state(live=1)
    pool, _ = grow(alone, 30)
    both, _ = grow(state(), 90)
    n = min(int(pool.slot_nodes[0]), int(both.slot_nodes[0]))
    assert n > 9
    assert pool.token[:n].tolist() == both.token[:n].tolist()


def test_the_budget_decides_before_a_node_is_drawn():
    """The costs that it sees do not depend on the words of the node at stake."""
    shown = {}
    for key in (1, 2):
        slots = state(live=1)
        slots.key.fill_(key)
        seen = shown[key] = []
        grow(slots, 30, choose=lambda costs, seen=seen: seen.append(list(costs)) or len(costs))
    assert shown[1][0] == shown[2][0]
    assert shown[1] != shown[2]
    pool, _ = grow(state(), 30, choose=lambda costs: min(len(costs), 6))
    assert int((pool.depth > 0).sum()) == 6


def test_a_budget_that_keeps_no_node_rests():
    """One draw would pay, the two of a node do not: nothing is drafted, and that is a miss."""
    slots = state(live=1)
    slots.context[0] = torch.tensor([1, 5, 3, 2])
    budget = AutoBudget(StepTimeTable([1, 2, 3, 64], [1.0, 1.0, 9.0, 99.0]))
    sampler = MultiDraftVerifier("canonical", graph(slots), reference())
    rows = [
        int(sampler.propose(slots, 1, budget.num_draft_tokens(1), budget).slot_nodes[0])
        for _ in range(4)
    ]
    assert rows == [1] * 4
    asked = [budget.num_draft_tokens(1) > 0 for _ in range(8)]
    # drafts that did not pay in steps 0 and 3 are tried again in step 8
    assert asked[:5] == [False] * 4 + [True]
