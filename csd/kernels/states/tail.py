"""Copy accepted nodes' features to their slots' tails, ring buffers indexed by position.

    tail[l, s, p % R] = node[l, accept_row[s, i]]    with p = slot_len[s] - accept_count[s] + i

for i < accept_count[s] and every layer l; of tokens with the same place the last one is stored.
slot_len counts a slot's tokens including the accepted ones, as after `csd.kernels.advance_slots`.
"""

from collections.abc import Callable

import torch

from csd.kernels.common.checks import check_tensor
from csd.kernels.common.operator import operator

BLOCK = 1024


def commit_tail_ref(
    node: torch.Tensor,  # [L, M, F]
    tail: torch.Tensor,  # [L, S, R, F], written in place
    slot_len: torch.Tensor,  # [S] int32
    accept_row: torch.Tensor,  # [S, A] int32
    accept_count: torch.Tensor,  # [S] int32
) -> None:
    """Plain PyTorch with fixed shapes; nothing is read on the host."""
    R = tail.shape[2]
    last = slot_len[:, None] - 1
    # [S, R]: the last position of each place
    p = last - (last - torch.arange(R, device=tail.device)) % R
    i = p - (slot_len - accept_count)[:, None]
    row = accept_row.gather(1, i.clamp(0, accept_row.shape[1] - 1).long()).clamp(min=0).long()
    unchanged = (i < 0) | (accept_count[:, None] < 1)
    tail.copy_(torch.where(unchanged[..., None], tail, node[:, row]))


def commit_tail_triton(
    node: torch.Tensor,
    tail: torch.Tensor,
    slot_len: torch.Tensor,
    accept_row: torch.Tensor,
    accept_count: torch.Tensor,
) -> None:
    """One launch."""

    import triton

    from csd.kernels.states.triton.conv import _commit_tail_kernel

    L, S, R, F = tail.shape
    block = min(BLOCK, triton.next_power_of_2(F))
    _commit_tail_kernel[(L * S, triton.cdiv(F, block))](
        node_ptr=node,
        tail_ptr=tail,
        slot_len_ptr=slot_len,
        accept_row_ptr=accept_row,
        accept_count_ptr=accept_count,
        node_stride=node.stride(0),
        S=S,
        A=accept_row.shape[1],
        R=R,
        F=F,
        BLOCK=block,
        num_warps=4,
    )


def _loop() -> tuple[Callable[..., bool], Callable]:
    from csd.kernels.states.cpu import conv

    return (lambda *args: conv.reads_tail(*args[:2])), conv.commit_tail


_commit_tail = operator(
    "commit_tail", commit_tail_ref, commit_tail_triton, loop=_loop, written=("tail",)
)


def commit_tail(
    node: torch.Tensor,  # [L, M, F]
    tail: torch.Tensor,  # [L, S, R, F], written in place
    slot_len: torch.Tensor,  # [S] int32
    accept_row: torch.Tensor,  # [S, A] int32, -1 padded
    accept_count: torch.Tensor,  # [S] int32
) -> None:
    """Copies the accepted rows of all layers to the places of their positions in the tails."""
    device = node.device
    check_tensor("node", node, (None, None, None), None, device, rows_apart=True)
    L, _, F = node.shape
    check_tensor("tail", tail, (L, None, None, F), node.dtype, device)
    S = tail.shape[1]
    check_tensor("slot_len", slot_len, (S,), torch.int32, device)
    check_tensor("accept_row", accept_row, (S, None), torch.int32, device)
    check_tensor("accept_count", accept_count, (S,), torch.int32, device)
    _commit_tail(node, tail, slot_len, accept_row, accept_count)
