"""The accepted path of every slot."""

import torch

from csd.kernels.verify.passes import Paths
from csd.state.pool import MAX_DEPTH, Pool, rooted
from csd.state.slots import Slots
from csd.state.verdict import LENGTH, RUNNING, STOP


def descend_ref(sample: torch.Tensor, pool: Pool, slots: Slots) -> Paths:
    """Returns the rows whose parents drew them, from the root on, cut by the slot's stop rules.

    sample: [M], -1 where no token was drawn.
    """
    device = sample.device
    n_slots = slots.count
    s = pool.slot.clamp(min=0).long()
    parent = pool.parent.clamp(min=0).long()
    accepted = rooted(pool, (pool.parent < 0) | (sample[parent] == pool.token))

    width = MAX_DEPTH + 1
    # rows that are not accepted write to an extra element after the table
    place = torch.where(accepted, s * width + pool.depth, n_slots * width)
    table = torch.full((n_slots * width + 1,), -1, dtype=torch.int32, device=device)
    rows = torch.arange(pool.rows, dtype=torch.int32, device=device)
    accept_row = table.scatter_(0, place, rows)[:-1].view(n_slots, width)

    path = torch.where(accept_row >= 0, sample[accept_row.clamp(min=0).long()], -1)
    ended = ((path[:, :, None] == slots.stop_ids[:, None, :]) & (path[:, :, None] >= 0)).any(-1)
    ever = ended.any(-1)
    until_end = torch.where(ever, ended.int().argmax(-1) + 1, width)
    count = (accept_row >= 0).sum(-1)
    left = slots.max_new - slots.generated
    kept = torch.minimum(torch.minimum(count, until_end), left).clamp(min=0)
    finish = torch.where(kept == left, LENGTH, RUNNING)
    finish = torch.where(ever & (until_end <= kept), STOP, finish)
    in_flight = pool.slot_nodes > 0
    kept = torch.where(in_flight, kept, 0).int()
    finish = torch.where(in_flight, finish, RUNNING).int()
    places = torch.arange(width, device=device)
    return torch.where(places < kept[:, None], accept_row, -1), kept, finish
