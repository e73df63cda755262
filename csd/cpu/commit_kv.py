"""Accepted rows' keys and values of all layers into the pages, in one call."""

import numpy as np
import torch

from csd.cpu.compiled import loop
from csd.cpu.numbers import PLAIN, memory, require
from csd.state.kv_cache import PAGE

BYTES = np.empty(0, np.uint8)


@loop
def _commit_kv(
    layers,
    size,  # bytes of a token's keys in a layer, and of its values
    nodes,  # addresses of node_k and node_v
    pages,  # of k_pages and v_pages
    node_stride,  # bytes from a layer to the next one
    page_stride,
    slot_pages,  # [S, SP]
    slot_len,  # [S]
    accept_row,  # [S, A]
    accept_count,  # [S]
    moved,
):
    for layer in range(layers):
        for s in range(accept_count.shape[0]):
            first = slot_len[s] - (accept_count[s] if moved else 0)
            for i in range(accept_count[s]):
                place = first + i
                row = layer * node_stride + accept_row[s, i] * size
                at = (slot_pages[s, place // PAGE] * PAGE + place % PAGE) * size
                at += layer * page_stride
                for kind in range(2):
                    given = memory(nodes[kind] + row, size, BYTES)
                    to = memory(pages[kind] + at, size, BYTES)
                    for j in range(size):
                        to[j] = given[j]


def reads_commit(
    node_k: torch.Tensor, node_v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor
) -> bool:
    """Whether the loop reads and writes `commit_kv`'s tensors."""
    return _side_by_side(node_k, node_v) and _side_by_side(k_pages, v_pages)


def commit_kv(
    node_k: torch.Tensor,  # [L, M, K, D]
    node_v: torch.Tensor,  # [L, M, K, D]
    k_pages: torch.Tensor,  # [L, n_pages, 64, K, D], written in place
    v_pages: torch.Tensor,  # [L, n_pages, 64, K, D], written in place
    slot_pages: torch.Tensor,
    slot_len: torch.Tensor,
    accept_row: torch.Tensor,
    accept_count: torch.Tensor,
    moved: bool = False,
) -> None:
    """`commit_kv_ref`. Raises TypeError for tensors that loops do not read."""
    nodes, pages = (node_k, node_v), (k_pages, v_pages)
    require(reads_commit(*nodes, *pages), "commit_kv", *nodes, *pages)
    width = node_k.element_size()
    _commit_kv(
        node_k.shape[0], node_k.shape[2] * node_k.shape[3] * width,
        tuple(x.data_ptr() for x in nodes), tuple(x.data_ptr() for x in pages),
        node_k.stride(0) * width, k_pages.stride(0) * width,
        *(x.numpy() for x in (slot_pages, slot_len, accept_row, accept_count)), moved,
    )  # fmt: skip


def _side_by_side(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether both lie in memory alike, a layer's rows without gaps."""
    plain = k.device.type == "cpu" and type(k) in PLAIN and type(v) in PLAIN
    return plain and k.stride() == v.stride() and bool(k.shape[0]) and k[0].is_contiguous()
