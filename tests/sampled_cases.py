"""Slots in the middle of their samples, and trees of draws for them."""

import torch

from csd.graph import sampled_tree
from csd.graph.consensus import ConsensusGraph
from csd.graph.table import GraphConfig
from csd.kernels.ops import reference
from csd.slots import Slots

CONFIG = GraphConfig(orders=(1, 2, 3, 4))


def state(live=3, slots=4, **changes):
    """Slots of one group in the middle of their samples."""
    s = Slots.empty(slots, 8, 40, CONFIG.context)
    s.live[:live] = True
    s.group[:live] = 0
    s.group_key[:2] = torch.tensor([7, 9])
    # of a group that has said nothing
    s.group[2] = 1 if live > 2 else -1
    s.prompt_len[:2] = 5
    s.key.copy_(torch.arange(slots) * 77 + 5)
    s.sample.copy_(torch.arange(slots))
    s.generated[:live] = torch.arange(live, dtype=torch.int32)
    s.context.copy_(torch.tensor([[1, 2, 3, 4], [2, 3, 4, 5], [6, 6, 6, 6], [0, 0, 0, 0]]))
    s.max_new.fill_(40)
    for name, value in changes.items():
        getattr(s, name).fill_(value)
    return s


def graph(slots):
    drafter = ConsensusGraph(reference(), torch.device("cpu"), CONFIG)
    drafter.start(7, [1, 2, 3, 4, 5, 1, 2, 4, 1, 3, 2, 1, 2, 3, 5, 1, 1, 4], slots)
    return drafter


def grow(slots, nodes, draws=3, choose=len):
    trees = sampled_tree.SampledTrees(graph(slots), reference().draft_tree, draws)
    return trees.grow(slots, int(slots.live.sum()), nodes, choose)
