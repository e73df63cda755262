"""Launches of `tree_delta_rule` and `tree_ssm`: one each."""

import torch
import triton

from csd.kernels.advance_state import state_tiles
from csd.kernels.tree_delta_rule.kernel import _tree_state_kernel
from csd.kernels.tree_paths import DEPTHS
from csd.state.recurrent import CHUNK, TAIL

# rows, and keys of a state, that a program multiplies at once: float32 products have no tensor
# cores, and their sums are all in registers
BLOCK_M, TILE_K = 16, 16


def tree_delta_rule_triton(
    q: torch.Tensor,
    value: torch.Tensor,
    strength: torch.Tensor,
    *nodes_and_states: torch.Tensor,
) -> torch.Tensor:
    """Returns outputs [M, H, Dv]; arguments as in `tree_delta_rule`."""
    return _launch(q, value, strength, *nodes_and_states)


def tree_ssm_triton(q: torch.Tensor, *nodes_and_states: torch.Tensor) -> torch.Tensor:
    """Returns outputs [M, H, Dv]; arguments as in `tree_ssm`."""
    return _launch(q, None, None, *nodes_and_states)


def _launch(
    q: torch.Tensor,
    value: torch.Tensor | None,
    strength: torch.Tensor | None,
    node_key: torch.Tensor,
    node_decay: torch.Tensor,
    node_update: torch.Tensor,
    state: torch.Tensor,
    key: torch.Tensor,
    update: torch.Tensor,
    decay: torch.Tensor,
    base: torch.Tensor,
    slot: torch.Tensor,
    position: torch.Tensor,
    path: torch.Tensor,
    slot_start: torch.Tensor,
    slot_nodes: torch.Tensor,
) -> torch.Tensor:
    S, H, Dk, Dv = state.shape
    out = torch.empty_like(node_update)
    tiles = state_tiles(Dk, Dv)
    _tree_state_kernel[(S + 1, H, triton.cdiv(Dv, tiles["BLOCK_V"]))](
        q_ptr=q,
        value_ptr=value,
        strength_ptr=strength,
        node_key_ptr=node_key,
        node_decay_ptr=node_decay,
        node_update_ptr=node_update,
        state_ptr=state,
        key_ptr=key,
        update_ptr=update,
        decay_ptr=decay,
        base_ptr=base,
        slot_ptr=slot,
        position_ptr=position,
        path_ptr=path,
        slot_start_ptr=slot_start,
        slot_nodes_ptr=slot_nodes,
        out_ptr=out,
        M=slot.shape[0],
        H=H,
        Hk=key.shape[2],
        Dk=Dk,
        Dv=Dv,
        DEPTHS=DEPTHS,
        TAIL=TAIL,
        CHUNK=CHUNK,
        SOLVE=value is not None,
        BLOCK_M=BLOCK_M,
        **tiles,
        BLOCK_D=triton.next_power_of_2(DEPTHS),
        TILE_K=TILE_K,
        num_warps=4,
    )
    return out
