"""Bounds of what is drafted: length, depth, end tokens, probability, the group; and the sources."""

from dataclasses import replace

import pytest
import torch
from helpers.kernels.draft_cases import CONFIG, one_slot
from helpers.oracles.graph_model import Graph

from csd.kernels.draft import draft_tree_ref
from csd.state.pool import HISTORY, OWN, PROMPT, ROOT, SIBLING


def chain(graph_tokens, group=11, weight=60000, total=65536, bit=0, config=CONFIG):
    """A graph of one sure walk."""
    graph = Graph(config)
    rows = []
    for i in range(1, len(graph_tokens)):
        context = ([-1] * config.context + graph_tokens[:i])[: -config.context - 1 : -1]
        rows.append((group, context, [(graph_tokens[i], weight)], total, bit))
    for i in range(0, len(rows), 4):
        graph.insert(rows[i : i + 4], [group])
    return graph


@pytest.mark.parametrize("left", [1, 2, 5])
def test_nothing_is_drafted_beyond_max_new(left):
    graph = chain([2, 1, 0, *range(3, 30)])
    slots = one_slot(max_new=left)
    slots.context[0] = torch.tensor([0, 1, 2])
    pool = draft_tree_ref(graph.table(), slots, 20, CONFIG)
    # a node at depth d predicts generated token d
    assert pool.token[: left + 1].tolist() == [0, *range(3, 3 + left - 1), -1]
    assert pool.depth.max() == left - 1


def test_the_tree_is_not_deeper_than_asked():
    graph = chain([2, 1, 0, *range(3, 40)])
    slots = one_slot()
    slots.context[0] = torch.tensor([0, 1, 2])
    for depth in (1, 4, 16, 40):
        pool = draft_tree_ref(graph.table(), slots, 30, replace(CONFIG, max_depth=depth))
        assert pool.depth.max() == min(depth, 16)


def test_end_tokens_are_not_drafted():
    graph = chain([2, 1, 0, 3, 4, 5])
    slots = one_slot()
    slots.context[0] = torch.tensor([0, 1, 2])
    slots.stop_ids[0, 3] = 4
    pool = draft_tree_ref(graph.table(), slots, 9, CONFIG)
    assert pool.token.tolist() == [0, 3] + [-1] * 7


def test_unlikely_paths_are_left_out():
    graph = chain([2, 1, 0, *range(3, 30)], weight=1 << 15)
    slots = one_slot()
    slots.context[0] = torch.tensor([0, 1, 2])
    config = replace(CONFIG, min_prob=0.1)
    pool = draft_tree_ref(graph.table(), slots, 30, config)
    drafted = pool.cost[pool.depth > 0]
    everything = draft_tree_ref(graph.table(), slots, 30, CONFIG)
    assert 0 < len(drafted) < (everything.depth > 0).sum()
    assert drafted.max() <= round(3.3219280948873626 * 2**16)


def test_a_group_never_drafts_for_another():
    graph = chain([2, 1, 0, 3, 4, 5], group=11)
    slots = one_slot(group=12)
    slots.context[0] = torch.tensor([0, 1, 2])
    pool = draft_tree_ref(graph.table(), slots, 9, CONFIG)
    assert pool.slot_nodes[0] == 1
    slots.group_key[0] = 11
    assert draft_tree_ref(graph.table(), slots, 9, CONFIG).slot_nodes[0] == 4


def test_sources_are_distinguished():
    N = CONFIG.context
    graph = Graph(CONFIG)
    context = [0, 1, 2]
    rows = [
        (11, context, [(3, 900)], 900, 62),
        (11, context, [(4, 800), (5, 600)], 1400, 1),
        (11, context, [(5, 50)], 50, 2),
        # only the shortest context has seen this one
        (11, [0, *[-1] * (N - 1)], [(6, 700), (7, 600)], 1300, 62),
        (11, context, [(7, 500), (3, 100)], 600, 63),
    ]
    graph.insert(rows, [11])
    slots = one_slot()
    slots.sample[0] = 62 + 2
    slots.context[0] = torch.tensor(context)
    config = replace(CONFIG, max_depth=1)
    pool = draft_tree_ref(graph.table(), slots, 6, config)
    source = dict(zip(pool.token.tolist(), pool.source.tolist(), strict=True))
    assert source == {0: ROOT, 3: PROMPT, 4: SIBLING, 5: OWN, 6: PROMPT, 7: HISTORY}
