"""`tree_delta_rule` and `tree_ssm` in plain PyTorch: fixed shapes, nothing is read on the host."""

import torch

from csd.kernels.advance_state import next_state
from csd.state.recurrent import TAIL, checkpoint


def tree_delta_rule_ref(
    q: torch.Tensor,  # [M, Hk, Dk]
    value: torch.Tensor,  # [M, H, Dv]
    strength: torch.Tensor,  # [M, H]
    node_key: torch.Tensor,  # [M, Hk, Dk]
    node_decay: torch.Tensor,  # [M, H]
    node_update: torch.Tensor,  # [M, H, Dv], written
    state: torch.Tensor,  # [S, H, Dk, Dv]
    key: torch.Tensor,  # [S, TAIL, Hk, Dk]
    update: torch.Tensor,  # [S, TAIL, H, Dv]
    decay: torch.Tensor,  # [S, TAIL, H]
    base: torch.Tensor,  # [S] int32
    slot: torch.Tensor,  # [M] int32
    position: torch.Tensor,  # [M] int32
    path: torch.Tensor,  # [M, DEPTHS] int32
    slot_start: torch.Tensor,  # [S] int32, not used here, nor is slot_nodes
    slot_nodes: torch.Tensor,  # [S] int32
) -> torch.Tensor:
    """Returns outputs [M, H, Dv] and writes the updates to node_update."""
    where = slot, position, path
    kept = state, key, update, decay, base
    k, q = (_each_head(x, node_decay.shape[1]) for x in (node_key, q))
    live, depth = _rows(slot, path)
    read = _read_after_tails(torch.stack((k, q)), *kept, *where)
    u = torch.zeros_like(value)
    for d in range(path.shape[1]):
        at = (depth == d) & live
        found = strength[..., None] * (value - node_decay[..., None] * read[0])
        u = torch.where(at[:, None, None], found, u)
        read = _read_after_node(read, torch.stack((k, q)), k, u, node_decay, path[:, d])
    node_update.copy_(u)
    return torch.where(live[:, None, None], read[1], 0)


def tree_ssm_ref(
    q: torch.Tensor,  # [M, Hk, Dk]
    node_key: torch.Tensor,  # [M, Hk, Dk]
    node_decay: torch.Tensor,  # [M, H]
    node_update: torch.Tensor,  # [M, H, Dv]
    state: torch.Tensor,  # [S, H, Dk, Dv]
    key: torch.Tensor,  # [S, TAIL, Hk, Dk]
    update: torch.Tensor,  # [S, TAIL, H, Dv]
    decay: torch.Tensor,  # [S, TAIL, H]
    base: torch.Tensor,  # [S] int32
    slot: torch.Tensor,  # [M] int32
    position: torch.Tensor,  # [M] int32
    path: torch.Tensor,  # [M, DEPTHS] int32
    slot_start: torch.Tensor,  # [S] int32, not used here, nor is slot_nodes
    slot_nodes: torch.Tensor,  # [S] int32
) -> torch.Tensor:
    """Returns outputs [M, H, Dv], with given updates `node_update`."""
    k, q = (_each_head(x, node_decay.shape[1]) for x in (node_key, q))
    live, _ = _rows(slot, path)
    read = _read_after_tails(q[None], state, key, update, decay, base, slot, position, path)
    for d in range(path.shape[1]):
        read = _read_after_node(read, q[None], k, node_update, node_decay, path[:, d])
    return torch.where(live[:, None, None], read[0], 0)


def _each_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1)


def _rows(slot: torch.Tensor, path: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[M] bool: True if a row is not padding; [M]: its depth."""
    return slot >= 0, (path >= 0).sum(1) - 1


def _read_after_tails(
    x: torch.Tensor,  # [2, M, H, Dk] or [1, ..]
    state: torch.Tensor, key: torch.Tensor, update: torch.Tensor, decay: torch.Tensor,
    base: torch.Tensor, slot: torch.Tensor, position: torch.Tensor, path: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """[.., M, H, Dv]: x times the state after the committed tokens of each row's slot."""
    s, H = slot.clamp(min=0).long(), state.shape[1]
    _, depth = _rows(slot, path)
    first = torch.maximum(checkpoint(position), base[s])
    later = next_state(state[None], key[None], update[None], decay[None], base)[0]
    chosen = torch.where((first > base[s])[:, None, None, None], later[s], state[s])
    read = (chosen * x[..., None]).sum(-2)
    committed = position - depth
    for i in range(TAIL):
        place = ((first + i) % TAIL).long()
        k = _each_head(key[s, place], H)
        added = (k * x).sum(-1, keepdim=True) * update[s, place]
        moved = decay[s, place][..., None] * read + added
        # entries after a tail may hold any value: select, since 0 * NaN is not 0
        read = torch.where((first + i < committed)[:, None, None], moved, read)
    return read


def _read_after_node(
    read: torch.Tensor, x: torch.Tensor, key: torch.Tensor, update: torch.Tensor,
    decay: torch.Tensor, row: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """`read` after the node `row` [M] of each row's path, or unchanged where it is -1."""
    r = row.clamp(min=0).long()
    added = (key[r] * x).sum(-1, keepdim=True) * update[r]
    moved = decay[r][..., None] * read + added
    return torch.where((row >= 0)[:, None, None], moved, read)
