"""The accepted paths of all slots, in one call; the reference is `descend_ref`."""

import torch

from csd.kernels.cpu.numbers import loop
from csd.kernels.verify.passes import Paths
from csd.state.pool import MAX_DEPTH, Pool
from csd.state.slots import Slots
from csd.state.verdict import LENGTH, RUNNING, STOP


@loop
def _descend(
    sample,  # [M]
    token,  # [M]
    parent,  # [M]
    slot_start,  # [S]
    slot_nodes,  # [S]
    stop_ids,  # [S, I]
    max_new,  # [S]
    generated,  # [S]
    accept_row,  # [S, A], written
    accept_count,  # [S], written
    finish,  # [S], written
):
    for s in range(slot_start.shape[0]):
        accept_row[s] = -1
        accept_count[s], finish[s] = 0, RUNNING
        left, end = max_new[s] - generated[s], False
        count, last = 0, -1
        # a parent precedes its children, which have different tokens
        for row in range(slot_start[s], slot_start[s] + slot_nodes[s]):
            if parent[row] != last or (last >= 0 and sample[last] != token[row]):
                continue
            if end or count >= left:
                break
            accept_row[s, count], last = row, row
            count += 1
            for i in range(stop_ids.shape[1]):
                end |= sample[row] >= 0 and sample[row] == stop_ids[s, i]
        accept_count[s] = count
        if slot_nodes[s]:
            finish[s] = STOP if end else LENGTH if count == left else RUNNING


def descend(sample: torch.Tensor, pool: Pool, slots: Slots) -> Paths:
    """`descend_ref`."""
    S = slots.count
    out = torch.empty(S, MAX_DEPTH + 1, dtype=torch.int32), *torch.empty(2, S, dtype=torch.int32)
    given = (
        sample, pool.token, pool.parent, pool.slot_start, pool.slot_nodes, slots.stop_ids,
        slots.max_new, slots.generated,
    )  # fmt: skip
    _descend(*(x.contiguous().numpy() for x in (*given, *out)))
    return out
