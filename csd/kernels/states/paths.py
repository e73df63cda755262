"""The rows above each row of a pool, by depth.

    path[m, d] = the row of depth d at or above row m, -1 below row m and in padding

A slot's nodes are ordered with parents first, so the set bits of an ancestor word are a path from
the root down. Plain PyTorch on every device; nothing is read on the host.
"""

import torch

from csd.state.pool import MAX_DEPTH, MAX_NODES
from csd.state.record import check_tensor

DEPTHS = MAX_DEPTH + 1


def tree_paths(
    slot: torch.Tensor,  # [M] int32, -1 in padding
    ancestors: torch.Tensor,  # [M] int64
    slot_start: torch.Tensor,  # [S] int32
) -> torch.Tensor:
    """Returns the paths [M, MAX_DEPTH + 1] int32."""
    device = slot.device
    check_tensor("slot", slot, (None,), torch.int32, device)
    check_tensor("ancestors", ancestors, tuple(slot.shape), torch.int64, device)
    check_tensor("slot_start", slot_start, (None,), torch.int32, device)
    node = torch.arange(MAX_NODES, device=device)
    # [M, MAX_NODES]
    above = (ancestors[:, None] >> node) & 1
    above = torch.where(slot[:, None] >= 0, above, 0)
    # unset bits go to an extra column after the last depth
    depth = torch.where(above > 0, above.cumsum(1) - 1, DEPTHS).clamp(max=DEPTHS)
    row = slot_start[slot.clamp(min=0).long()][:, None] + node.int()
    path = torch.full((slot.shape[0], DEPTHS + 1), -1, dtype=torch.int32, device=device)
    return path.scatter_(1, depth, row)[:, :DEPTHS].contiguous()
