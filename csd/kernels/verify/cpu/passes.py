"""The loops of verification, as `csd.kernels.verify.passes.Passes`.

`descend` follows the accepted paths of all slots in one call, as `descend_ref`; the other passes
are in `heads.py` and `draws.py`.
"""

import torch

from csd.kernels.numba.jit import loop
from csd.kernels.verify.cpu.draws import draw
from csd.kernels.verify.cpu.heads import heads, log_sum
from csd.kernels.verify.passes import Passes, Paths
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import ACCEPT, LENGTH, RUNNING, STOP


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
    """Write the accepted path of each slot and its state."""
    for s in range(slot_start.shape[0]):
        accept_row[s] = -1
        left, end_row = max_new[s] - generated[s], slot_start[s] + slot_nodes[s]
        row, count, end = slot_start[s] if slot_nodes[s] else -1, 0, False
        while row >= 0 and count < left and not end:
            accept_row[s, count] = row
            count += 1
            end = ends(sample[row], stop_ids[s])
            row = child(token, parent, row, end_row, sample[row])
        accept_count[s] = count
        finish[s] = finished(end, count == left) if slot_nodes[s] else RUNNING


@loop
def child(
    token,  # [M]
    parent,  # [M]
    row,
    end_row,  # the row after the slot's last one
    drawn,
):
    """Child of `row` whose token is `drawn`, or -1."""
    # a parent precedes its children, which have different tokens
    for other in range(row + 1, end_row):
        if parent[other] == row and token[other] == drawn:
            return other
    return -1


@loop
def ends(drawn, stop_ids):
    """True if the token `drawn` is one of `stop_ids`; -1 is no token."""
    is_end = False
    for i in range(stop_ids.shape[0]):
        is_end |= drawn >= 0 and drawn == stop_ids[i]
    return is_end


@loop
def finished(end, full):
    """State of a slot: STOP at an end token, LENGTH at its last token, else RUNNING."""
    return STOP if end else LENGTH if full else RUNNING


def descend(sample: torch.Tensor, pool: Pool, slots: Slots) -> Paths:
    """Accepted rows [S, A], their numbers [S] and the slots' states [S], as `descend_ref`."""
    S = slots.count
    shapes = (S, ACCEPT), (S,), (S,)
    out = tuple(torch.empty(shape, dtype=torch.int32) for shape in shapes)
    arrays = (
        sample,
        pool.token,
        pool.parent,
        pool.slot_start,
        pool.slot_nodes,
        slots.stop_ids,
        slots.max_new,
        slots.generated,
    )
    _descend(*(x.contiguous().numpy() for x in (*arrays, *out)))
    return out


PASSES = Passes(heads, log_sum, draw, descend)
