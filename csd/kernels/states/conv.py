"""A short causal convolution of each channel along the paths of a pool's trees, and its commit.

    y_j = f(bias + sum over o = W - 1 .. 0 of weight[:, W - 1 - o] x(j, o)),    f(y) = silu(y) or y

x(j, o) is the input o tokens before row j on its own path: that of a node above it, then of the
slot's tail, which holds the input of position p at place p % (W - 1), and zero before the text
begins. The sum is at least float32 and rounded once, and f is applied to the rounded sum, as by
PyTorch's convolution and activation.

`commit_tail` copies accepted nodes' features to their slots' tails, ring buffers by position,

    tail[l, s, p % R] = node[l, accept_row[s, i]]    with p = slot_len[s] - accept_count[s] + i

for i < accept_count[s] and every layer l; of tokens with the same place the last one is stored.
slot_len counts a slot's tokens including the accepted ones, as after `csd.kernels.advance_slots`.
"""

from collections.abc import Callable

import torch

from csd.kernels.common.operator import operator
from csd.kernels.states.paths import DEPTHS
from csd.state.record import check_tensor
from csd.state.recurrent import wide

BLOCK_C = 256


def tree_conv_ref(
    x: torch.Tensor,  # [M, C]
    weight: torch.Tensor,  # [C, W]
    bias: torch.Tensor | None,  # [C]
    tail: torch.Tensor,  # [S, W - 1, C]
    slot: torch.Tensor,  # [M] int32
    position: torch.Tensor,  # [M] int32
    path: torch.Tensor,  # [M, DEPTHS] int32
    silu: bool,
) -> torch.Tensor:
    """Returns [M, C]. Plain PyTorch with fixed shapes; nothing is read on the host."""
    W, kind = weight.shape[1], wide(x.dtype)
    s, live = slot.clamp(min=0).long(), slot >= 0
    depth = (path >= 0).sum(1) - 1
    y = torch.zeros(x.shape, dtype=kind, device=x.device)
    if bias is not None:
        y = y + bias.to(kind)
    for back in range(W - 1, -1, -1):
        row = path.gather(1, (depth - back).clamp(min=0)[:, None])[:, 0].clamp(min=0).long()
        column = x[row]
        if back:
            p = position - back
            before = torch.where((p >= 0)[:, None], tail[s, (p % (W - 1)).long()], 0)
            column = torch.where((depth >= back)[:, None], column, before)
        y = y + weight[:, W - 1 - back].to(kind) * column.to(kind)
    y = y.to(x.dtype)
    if silu:
        # on a CPU, the rounding of PyTorch's `silu` depends on the element's index
        y = (y.to(kind) / y.to(kind).neg().exp_().add_(1)).to(x.dtype)
    return torch.where(live[:, None], y, 0)


def tree_conv_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tail: torch.Tensor,
    slot: torch.Tensor,
    position: torch.Tensor,
    path: torch.Tensor,
    silu: bool,
) -> torch.Tensor:
    """One launch."""

    import triton
    import triton.language as tl

    from csd.kernels.states.triton.conv import tree_conv_kernel

    M, C = x.shape
    y = torch.empty_like(x)
    block = min(BLOCK_C, triton.next_power_of_2(C))
    tree_conv_kernel[(M, triton.cdiv(C, block))](
        x_ptr=x,
        weight_ptr=weight,
        bias_ptr=bias,
        tail_ptr=tail,
        slot_ptr=slot,
        position_ptr=position,
        path_ptr=path,
        y_ptr=y,
        C=C,
        W=weight.shape[1],
        DEPTHS=DEPTHS,
        SILU=silu,
        WIDE=tl.float64 if x.dtype == torch.float64 else tl.float32,
        BLOCK_C=block,
        BLOCK_D=triton.next_power_of_2(DEPTHS),
        num_warps=4,
    )
    return y


def _loop() -> tuple[Callable[..., bool], Callable]:
    from csd.kernels.states.cpu import conv

    return (lambda *args: conv.reads_conv(*args[:4])), conv.tree_conv


_tree_conv = operator(
    "tree_conv",
    tree_conv_ref,
    tree_conv_triton,
    loop=_loop,
    fake=lambda x, *others: torch.empty_like(x),
)


def tree_conv(
    x: torch.Tensor,  # [M, C]
    weight: torch.Tensor,  # [C, W], 2 <= W <= 17, the weight of the oldest input first
    bias: torch.Tensor | None,  # [C]
    tail: torch.Tensor,  # [S, W - 1, C]
    slot: torch.Tensor,  # [M] int32, -1 in padding
    position: torch.Tensor,  # [M] int32
    path: torch.Tensor,  # [M, 17] int32, of `csd.kernels.tree_paths`
    silu: bool = False,
) -> torch.Tensor:
    """Returns [M, C] in x's dtype, which is also that of the weights; zeros in padding."""
    device = x.device
    check_tensor("x", x, (None, None), None, device)
    M, C = x.shape
    check_tensor("weight", weight, (C, None), x.dtype, device)
    W = weight.shape[1]
    if not 2 <= W <= DEPTHS:
        raise ValueError(f"weight must have 2 to {DEPTHS} columns, got {W}")
    if bias is not None:
        check_tensor("bias", bias, (C,), x.dtype, device)
    check_tensor("tail", tail, (None, W - 1, C), x.dtype, device)
    for name, y, shape in (
        ("slot", slot, (M,)),
        ("position", position, (M,)),
        ("path", path, (M, DEPTHS)),
    ):
        check_tensor(name, y, shape, torch.int32, device)
    return _tree_conv(x, weight, bias, tail, slot, position, path, silu)


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

    from csd.kernels.states.triton.conv import commit_tail_kernel

    L, S, R, F = tail.shape
    block = min(BLOCK, triton.next_power_of_2(F))
    commit_tail_kernel[(L * S, triton.cdiv(F, block))](
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


def _tail_loop() -> tuple[Callable[..., bool], Callable]:
    from csd.kernels.states.cpu import conv

    return (lambda *args: conv.reads_tail(*args[:2])), conv.commit_tail


_commit_tail = operator(
    "commit_tail", commit_tail_ref, commit_tail_triton, loop=_tail_loop, written=("tail",)
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
