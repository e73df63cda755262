"""The gated delta rule along the paths of a pool's trees, from the slots' states.

A head's state S is a matrix of keys and values. Token t has a query q_t, a key k_t of length one, a
value v_t, a decay d_t in (0, 1] and a strength b_t, and

    S_t = d_t S_{t-1} + k_t u_t^T,    u_t = b_t (v_t - d_t S_{t-1}^T k_t),    o_t = S_t^T q_t

(Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024.) No node needs a state of its own. With
S the state at the checkpoint of row j (`csd/state/recurrent.py`) and the tokens i after it in
order, those of the slot's tail and then the nodes above j,

    a <- S^T k_j,    a <- d_i a + (k_i . k_j) u_i for all i < j,    u_j = b_j (v_j - d_j a)
    o <- S^T q_j,    o <- d_i o + (k_i . q_j) u_i for all i <= j

which is the recurrence applied to one vector: decays are multiplied in the same order, and no two
logarithms are subtracted. The updates u_i of a tail are stored, so that its tokens need no second
product with a state. A row's sums run over its own text in order of position, from a state that
is a function of that text: its bits depend on nothing else.

A row's checkpoint may be one chunk after the slot's stored one (`base`); the state is then advanced
by `add_chunk`, as in `csd.kernels.advance_state`.
"""

import torch

from csd.kernels.advance_state import check_states
from csd.kernels.checks import check_tensor
from csd.kernels.torch_operators import operator
from csd.kernels.tree_delta_rule.launch import tree_delta_rule_triton
from csd.kernels.tree_delta_rule.reference import tree_delta_rule_ref
from csd.kernels.tree_paths import DEPTHS

__all__ = ["tree_delta_rule", "tree_delta_rule_ref", "tree_delta_rule_triton"]

_tree_delta_rule = operator(
    "tree_delta_rule", tree_delta_rule_ref, tree_delta_rule_triton, written=("node_update",),
    fake=lambda q, value, *others: torch.empty_like(value),
)  # fmt: skip


def tree_delta_rule(
    q: torch.Tensor,  # [M, Hk, Dk], scaled
    value: torch.Tensor,  # [M, H, Dv]
    strength: torch.Tensor,  # [M, H]
    node_key: torch.Tensor,  # [M, Hk, Dk], of length one
    node_decay: torch.Tensor,  # [M, H]
    node_update: torch.Tensor,  # [M, H, Dv], written
    state: torch.Tensor,  # [S, H, Dk, Dv], at `base`
    key: torch.Tensor,  # [S, 32, Hk, Dk], of the tokens after `base`, by position % 32
    update: torch.Tensor,  # [S, 32, H, Dv]
    decay: torch.Tensor,  # [S, 32, H]
    base: torch.Tensor,  # [S] int32
    slot: torch.Tensor,  # [M] int32, -1 in padding
    position: torch.Tensor,  # [M] int32
    path: torch.Tensor,  # [M, 17] int32, of `csd.kernels.tree_paths`
    slot_start: torch.Tensor,  # [S] int32
    slot_nodes: torch.Tensor,  # [S] int32
) -> torch.Tensor:
    """Returns outputs [M, H, Dv] and writes the updates to node_update; both are 0 in padding.

    All of one dtype, float32 or float64. Head h has the query and key of head h // (H / Hk).
    """
    check_states(state, key, update, decay)
    M, H, Dv = slot.shape[0], state.shape[1], state.shape[3]
    check_nodes(
        q, node_key, node_decay, node_update, state, key, base, slot, position, path, slot_start,
        slot_nodes,
    )  # fmt: skip
    check_tensor("value", value, (M, H, Dv), state.dtype, state.device)
    check_tensor("strength", strength, (M, H), state.dtype, state.device)
    return _tree_delta_rule(
        q, value, strength, node_key, node_decay, node_update, state, key, update, decay, base,
        slot, position, path, slot_start, slot_nodes,
    )  # fmt: skip


def check_nodes(
    q: torch.Tensor, node_key: torch.Tensor, node_decay: torch.Tensor, node_update: torch.Tensor,
    state: torch.Tensor, key: torch.Tensor, base: torch.Tensor, slot: torch.Tensor,
    position: torch.Tensor, path: torch.Tensor, slot_start: torch.Tensor, slot_nodes: torch.Tensor,
) -> None:  # fmt: skip
    """Raises ValueError, naming the tensor, unless the operands fit the states."""
    S, H, Dk, Dv = state.shape
    kind, device, M = state.dtype, state.device, slot.shape[0]
    keys = M, key.shape[2], Dk
    for name, x, shape in (
        ("q", q, keys), ("node_key", node_key, keys), ("node_decay", node_decay, (M, H)),
        ("node_update", node_update, (M, H, Dv)),
    ):  # fmt: skip
        check_tensor(name, x, shape, kind, device)
    for name, whole, size in (
        ("base", base, (S,)), ("slot", slot, (M,)), ("position", position, (M,)),
        ("path", path, (M, DEPTHS)), ("slot_start", slot_start, (S,)),
        ("slot_nodes", slot_nodes, (S,)),
    ):  # fmt: skip
        check_tensor(name, whole, size, torch.int32, device)
