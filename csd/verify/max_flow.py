"""Optimal split of the mass of pairs between their members, by maximum flow.

Each pair {i, j} of s items has mass m_ij = m_ji to be split, f_ij to i and f_ji = m_ij - f_ij to j.
With base_i the mass that item i already has, the program is

    max  sum over i of min( limit_i, base_i + sum over j of f_ij ),    0 <= f_ij <= m_ij

a flow from pairs to items. Moving mass of {i, j} from i to j is an arc of capacity f_ij, so it is a
flow over the items alone, from those above their limit to those below. It is solved by
push-relabel, all items of all rows at once: an item above its limit pushes along every arc that
goes one label down, and one that has no such arc is relabelled. Mass that reaches no item below
its limit stays.
"""

import torch

# zero, relative to masses of order 1
EPS = 1e-15


def split_pairs(base: torch.Tensor, mass: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Optimal split f [B, s, s].

    base, limit: [B, s] float64, not negative. mass: [B, s, s] float64, symmetric, 0 on the
    diagonal. The start gives each pair to its smaller index.
    """
    s = base.shape[1]
    flow = mass.triu()
    excess = base + flow.sum(-1) - limit
    label = torch.zeros(base.shape, dtype=torch.int64, device=base.device)
    while True:
        active = (excess > EPS) & (label < s)
        if not bool(active.any()):
            return flow
        arc = flow > EPS
        down = arc & (label[:, :, None] == label[:, None, :] + 1)
        capacity = torch.where(down & active[:, :, None], flow, 0)
        # each item fills its arcs in order until its excess is spent
        before = capacity.cumsum(-1) - capacity
        push = torch.minimum((excess[:, :, None] - before).clamp(min=0), capacity)
        flow = flow - push + push.mT
        excess = excess - push.sum(-1) + push.sum(-2)
        stuck = active & ~down.any(-1)
        lowest = torch.where(arc, label[:, None, :], s).amin(-1) + 1
        label = torch.where(stuck, lowest.clamp(max=s), label)
