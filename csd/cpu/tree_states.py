"""`csd.kernels.tree_delta_rule` and `csd.kernels.tree_ssm` as a loop over slots and key heads."""

import torch
from numba import prange

from csd.cpu.advance_state import reads_states
from csd.cpu.state_rows import slot_head
from csd.cpu.tensor_access import LIKE, memory, require
from csd.cpu.threads import by_threads
from csd.cpu.tiles import ISA


@by_threads
def _tree_states(
    shape, q, value, strength, node_key, node_decay, node_update, state, key, update, decay, base,
    slot, position, path, slot_start, slot_nodes, out, solve, like, isa,
):  # fmt: skip
    """Write `out` and, with `solve` (the delta rule), node_update.

    Slots and key heads run in parallel. Tensors up to `decay` and `out` are addresses.
    """
    S, H, Hk, Dk, Dv = shape
    for task in prange((S + 1) * Hk):
        s, g = task // Hk, task % Hk
        if s == S:
            # padding rows, for the value heads of key head g
            each, size = H // Hk, like.itemsize
            for m in range(slot.shape[0]):
                if slot[m] < 0:
                    offset, count = (m * H + g * each) * Dv * size, each * Dv
                    memory(out + offset, count, like)[:] = 0
                    if solve:
                        memory(node_update + offset, count, like)[:] = 0
        elif slot_nodes[s] > 0:
            slot_head(
                (H, Hk, Dk, Dv),
                s,
                g,
                slot_nodes[s],
                slot_start[s],
                base[s],
                q,
                value,
                strength,
                node_key,
                node_decay,
                node_update,
                state,
                key,
                update,
                decay,
                position,
                path,
                out,
                solve,
                like,
                isa,
            )


def _run(
    q: torch.Tensor, value: torch.Tensor | None, strength: torch.Tensor | None,
    tensors: tuple[torch.Tensor, ...],
) -> torch.Tensor:  # fmt: skip
    """Outputs [M, H, Dv]; with `value` and `strength` it solves for and writes node_update."""
    floats, (base, slot, position, path, slot_start, slot_nodes) = tensors[:7], tensors[7:]
    node_update, state = floats[2:4]
    S, H, Dk, Dv = state.shape
    out = torch.empty_like(node_update)
    given = q, value, strength, *floats
    M = slot.shape[0]
    _tree_states(
        H * (S * Dk * Dv + 4 * M * Dk * Dv), (S, H, q.shape[1], Dk, Dv),
        *(0 if x is None else x.data_ptr() for x in given),
        *(x.numpy() for x in (base, slot, position, path, slot_start, slot_nodes)),
        out.data_ptr(), value is not None, LIKE[state.dtype], ISA["fma"],
    )  # fmt: skip
    return out


def tree_delta_rule(
    q: torch.Tensor, value: torch.Tensor, strength: torch.Tensor, *nodes_and_states: torch.Tensor
) -> torch.Tensor:
    """Outputs [M, H, Dv] of the gated delta rule; writes node_update. See `tree_delta_rule_ref`.

    Raises TypeError for tensors that loops do not read.
    """
    given = q, value, strength, *nodes_and_states[:7]
    require(reads_states(*given), "tree_delta_rule", *given)
    return _run(q, value, strength, nodes_and_states)


def tree_ssm(q: torch.Tensor, *nodes_and_states: torch.Tensor) -> torch.Tensor:
    """Outputs [M, H, Dv] of the state space model, as `tree_ssm_ref`.

    Raises TypeError for tensors that loops do not read.
    """
    given = q, *nodes_and_states[:7]
    require(reads_states(*given), "tree_ssm", *given)
    return _run(q, None, None, nodes_and_states)
