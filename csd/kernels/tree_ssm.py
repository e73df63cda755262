"""Mamba-2's state space model along the paths of a pool's trees, from the slots' states.

    S_t = d_t S_{t-1} + B_t u_t^T,    u_t = dt_t x_t,    d_t = exp(dt_t A),    o_t = S_t^T C_t

(Dao and Gu, "Transformers are SSMs", 2024; the output is o_t + D x_t.) It is `tree_delta_rule` with
key B_t and query C_t, and with given updates, so there is nothing to solve.
"""

import torch

from csd.kernels.advance_state import check_states
from csd.kernels.torch_operators import operator
from csd.kernels.tree_delta_rule import check_nodes
from csd.kernels.tree_delta_rule.launch import tree_ssm_triton
from csd.kernels.tree_delta_rule.reference import tree_ssm_ref

__all__ = ["tree_ssm", "tree_ssm_ref", "tree_ssm_triton"]

_tree_ssm = operator(
    "tree_ssm", tree_ssm_ref, tree_ssm_triton,
    fake=lambda q, node_key, node_decay, node_update, *others: torch.empty_like(node_update),
)  # fmt: skip


def tree_ssm(
    q: torch.Tensor,  # [M, Hk, Dk], C
    node_key: torch.Tensor,  # [M, Hk, Dk], B
    node_decay: torch.Tensor,  # [M, H]
    node_update: torch.Tensor,  # [M, H, Dv], dt x
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
    """Returns outputs [M, H, Dv], zeros in padding. All of one dtype, float32 or float64."""
    check_states(state, key, update, decay)
    check_nodes(
        q, node_key, node_decay, node_update, state, key, base, slot, position, path, slot_start,
        slot_nodes,
    )  # fmt: skip
    return _tree_ssm(
        q, node_key, node_decay, node_update, state, key, update, decay, base, slot, position,
        path, slot_start, slot_nodes,
    )  # fmt: skip
