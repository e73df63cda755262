"""Copy of accepted rows' keys and values into the pages, for all layers in one call."""

import numpy as np
import torch

from csd.kernels.numba.jit import loop
from csd.kernels.numba.tensors import memory, require
from csd.state.kv_cache import PAGE
from csd.state.record import on_host

BYTES = np.empty(0, np.uint8)


@loop
def _commit_kv(
    layers,
    sizes,  # bytes of a token's keys in a layer, and of its values
    nodes,  # addresses of node_k and node_v
    pages,  # addresses of k_pages and v_pages
    node_strides,  # bytes from a layer to the next one
    page_strides,  # likewise
    slot_pages,  # [S, SP]
    slot_len,  # [S]
    accept_row,  # [S, A]
    accept_count,  # [S]
    moved,  # whether slot_len counts the accepted rows already
):
    """Copy accepted rows to their places in the pages, as bytes."""
    for layer in range(layers):
        for s in range(accept_count.shape[0]):
            first = slot_len[s] - (accept_count[s] if moved else 0)
            for i in range(accept_count[s]):
                position = first + i
                token = slot_pages[s, position // PAGE] * PAGE + position % PAGE
                for kind in range(2):
                    size = sizes[kind]
                    row = layer * node_strides[kind] + accept_row[s, i] * size
                    offset = layer * page_strides[kind] + token * size
                    node = memory(nodes[kind] + row, size, BYTES)
                    to = memory(pages[kind] + offset, size, BYTES)
                    for j in range(size):
                        to[j] = node[j]


def reads_commit(*tensors: torch.Tensor) -> bool:
    """True if the loop takes nodes and pages: layers on the CPU, each with contiguous rows."""
    return on_host(*tensors) and all(x.shape[0] and x[0].is_contiguous() for x in tensors)


def commit_kv(
    node_k: torch.Tensor,  # [L, M, K, D]
    node_v: torch.Tensor,  # [L, M, K, Dv]
    k_pages: torch.Tensor,  # [L, n_pages, 64, K, D], written in place
    v_pages: torch.Tensor,  # [L, n_pages, 64, K, Dv], written in place
    slot_pages: torch.Tensor,
    slot_len: torch.Tensor,
    accept_row: torch.Tensor,
    accept_count: torch.Tensor,
    moved: bool = False,
) -> None:
    """Copies accepted rows into the pages in place, as `commit_kv_ref`.

    Raises TypeError for tensors that loops do not read.
    """
    nodes, pages = (node_k, node_v), (k_pages, v_pages)
    require(reads_commit(*nodes, *pages), "commit_kv", *nodes, *pages)
    width = node_k.element_size()
    _commit_kv(
        node_k.shape[0],
        tuple(x.shape[2] * x.shape[3] * width for x in nodes),
        tuple(x.data_ptr() for x in nodes),
        tuple(x.data_ptr() for x in pages),
        tuple(x.stride(0) * width for x in nodes),
        tuple(x.stride(0) * width for x in pages),
        *(x.numpy() for x in (slot_pages, slot_len, accept_row, accept_count)),
        moved,
    )
