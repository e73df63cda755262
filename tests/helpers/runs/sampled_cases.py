"""Slots that drafts are drawn for, and the trees of those draws."""

import torch

from csd.graph.consensus import ConsensusGraph
from csd.kernels.ops import reference
from csd.research.verify import sampled_tree
from csd.state.context_table import GraphConfig
from csd.state.slots import Slots

CONFIG = GraphConfig(orders=(1, 2, 3, 4))


def alike(count, **changes):
    """Slots of one group that differ in their sample alone."""
    s = Slots.empty(count, 8, 40, CONFIG.context)
    s.live.fill_(True)
    s.group.fill_(0)
    s.group_key[0] = 7
    s.prompt_len[0] = 5
    s.sample.copy_(torch.arange(count))
    s.context.copy_(torch.tensor([1, 2, 3, 4]).expand(count, 4))
    s.max_new.fill_(40)
    return changed(s, changes)


def state(live=3, **changes):
    """Four slots in the middle of their samples, the third in a group without tokens."""
    s = alike(4)
    s.live[live:], s.group[live:] = False, -1
    s.group[2] = 1 if live > 2 else -1
    s.group_key[:2] = torch.tensor([7, 9])
    s.prompt_len[:2] = 5
    s.key.copy_(torch.arange(4) * 77 + 5)
    s.generated[:live] = torch.arange(live, dtype=torch.int32)
    s.context.copy_(torch.tensor([[1, 2, 3, 4], [2, 3, 4, 5], [6, 6, 6, 6], [0, 0, 0, 0]]))
    return changed(s, changes)


def changed(slots, changes):
    for name, value in changes.items():
        getattr(slots, name).fill_(value)
    return slots


def graph(slots):
    drafter = ConsensusGraph(reference(), torch.device("cpu"), CONFIG)
    prompt = [1, 2, 3, 4, 5, 1, 2, 4, 1, 3, 2, 1, 2, 3, 5, 1, 1, 4]
    drafter.observe_prompt(7, prompt, 0, len(prompt), slots)
    return drafter


def grow(slots, nodes, draws=3, choose=len):
    trees = sampled_tree.SampledTrees(graph(slots), reference().draft_tree, draws)
    return trees.grow(slots, int(slots.live.sum()), nodes, choose)
