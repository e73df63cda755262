"""`csd.kernels.tree_conv` and `csd.kernels.commit_tail` as loops.

The convolution is vectorized over a row's channels. Accepted rows are copied into the slots' tails
as bytes.
"""

import numpy as np
import torch

from csd.kernels.layers.cpu.elementwise import EXP, LOW
from csd.kernels.numba.jit import loop
from csd.kernels.numba.math import exp
from csd.kernels.numba.tensors import LIKE, PLAIN, memory, read, readable, require, rounded
from csd.kernels.numba.threads import by_threads, share


@loop
def _add_input(y, x, weight, like):
    """y += weight x for one tap of the convolution, over all channels; y [C] float32."""
    for c in range(y.shape[0]):
        y[c] = y[c] + read(weight[c]) * read(x[c])


@by_threads
def _tree_conv(part, parts, shape, x, weight, bias, tail, slot, position, path, silu, y, like):
    """Write the convolution's outputs y [M, C], zeros in padding; W: width of the convolution."""
    M, C, W = shape
    # [W, C]: vectors read adjacent channels, but a channel's weights are adjacent in memory
    source, turned = memory(weight, (C, W), like), np.empty((W, C), like.dtype)
    for c in range(C):
        for step in range(W):
            turned[step, c] = source[c, step]
    first, last = share(M, part, parts)
    for m in range(first, last):
        size = like.itemsize
        out = memory(y + m * C * size, C, like)
        if slot[m] < 0:
            for c in range(C):
                out[c] = rounded(np.float32(0), like)
        else:
            sums = np.zeros(C, np.float32)
            if bias:
                added = memory(bias, C, like)
                for c in range(C):
                    sums[c] = read(added[c])
            depth = -1
            for d in range(path.shape[1]):
                depth += path[m, d] >= 0
            for step in range(W):
                back = W - 1 - step
                if back <= depth:
                    offset = x + path[m, depth - back] * C * size
                else:
                    p = position[m] - back
                    if p < 0:
                        continue
                    offset = tail + (slot[m] * (W - 1) + p % (W - 1)) * C * size
                _add_input(sums, memory(offset, C, like), turned[step], like)
            if silu:
                for c in range(C):
                    value = read(rounded(sums[c], like))
                    out[c] = rounded(value / (exp(-value) + np.float32(1)), like)
            else:
                for c in range(C):
                    out[c] = rounded(sums[c], like)


def reads_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tail: torch.Tensor
) -> bool:
    """True if the loop reads `tree_conv`'s tensors."""
    whole = all(y is None or y.is_contiguous() for y in (x, weight, bias, tail))
    return x.dtype in LOW and whole and readable(x, weight, bias, tail)


def tree_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tail: torch.Tensor,
    slot: torch.Tensor,
    position: torch.Tensor,
    path: torch.Tensor,
    silu: bool,
) -> torch.Tensor:
    """Convolution along the trees' paths, [M, C], as `tree_conv_ref`.

    Raises TypeError for tensors that loops do not read.
    """
    require(reads_conv(x, weight, bias, tail), "tree_conv", x, weight, bias, tail)
    (M, C), W = x.shape, weight.shape[1]
    y = torch.empty_like(x)
    _tree_conv(
        M * C * (W + EXP),
        (M, C, W),
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        tail.data_ptr(),
        *(y.numpy() for y in (slot, position, path)),
        silu,
        y.data_ptr(),
        LIKE[x.dtype],
    )
    return y


BYTES = np.empty(0, np.uint8)


@loop
def _commit_tail(shape, size, node, node_stride, tail, slot_len, accept_row, accept_count):
    """Copy the last R accepted rows of each slot, `size` bytes each, to its ring; addresses."""
    L, S, R = shape
    for layer in range(L):
        for s in range(S):
            count = accept_count[s]
            first = slot_len[s] - count
            for i in range(max(0, count - R), count):
                source = memory(node + layer * node_stride + accept_row[s, i] * size, size, BYTES)
                offset = ((layer * S + s) * R + (first + i) % R) * size
                to = memory(tail + offset, size, BYTES)
                for j in range(size):
                    to[j] = source[j]


def reads_tail(node: torch.Tensor, tail: torch.Tensor) -> bool:
    """True if the loop reads and writes `commit_tail`'s tensors."""
    plain = all(type(x) in PLAIN and x.is_cpu for x in (node, tail))
    return plain and tail.is_contiguous() and bool(node.shape[0]) and node[0].is_contiguous()


def commit_tail(
    node: torch.Tensor,
    tail: torch.Tensor,
    slot_len: torch.Tensor,
    accept_row: torch.Tensor,
    accept_count: torch.Tensor,
) -> None:
    """Copies accepted rows into the slots' tails in place, as `commit_tail_ref`.

    Raises TypeError for tensors that loops do not read.
    """
    require(reads_tail(node, tail), "commit_tail", node, tail)
    L, S, R, F = tail.shape
    width = node.element_size()
    _commit_tail(
        (L, S, R),
        F * width,
        node.data_ptr(),
        node.stride(0) * width,
        tail.data_ptr(),
        *(x.numpy() for x in (slot_len, accept_row, accept_count)),
    )
