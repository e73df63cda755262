"""Copy of accepted rows into slots' tails, as bytes; see `csd.kernels.commit_tail`."""

import numpy as np
import torch

from csd.cpu.compiled import loop
from csd.cpu.tensor_access import PLAIN, memory, require

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
                given = memory(node + layer * node_stride + accept_row[s, i] * size, size, BYTES)
                offset = ((layer * S + s) * R + (first + i) % R) * size
                to = memory(tail + offset, size, BYTES)
                for j in range(size):
                    to[j] = given[j]


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
        (L, S, R), F * width, node.data_ptr(), node.stride(0) * width, tail.data_ptr(),
        slot_len.numpy(), accept_row.numpy(), accept_count.numpy(),
    )  # fmt: skip
