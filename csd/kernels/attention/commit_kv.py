"""Append keys and values to the pages: those of accepted nodes, and of prompt chunks.

    commit_kv      pages[l, place slot_len[s] + i of slot s] = node[l, accept_row[s, i]]
                   for i < accept_count[s] and every layer l; with `moved`, slot_len counts the
                   accepted rows already
    write_prompt   pages[.., place start + r of a page list] = chunk[.., r]

Place p of a page table is token p % 64 of page table[p // 64]. Nodes are stored in buffers of their
own, so source and target never overlap.
"""

from collections.abc import Callable

import torch

from csd.kernels.common.operator import operator
from csd.state.kv_cache import PAGE
from csd.state.record import check_tensor

# accepted rows of a slot that one program copies: most steps accept fewer
BLOCK_A = 4


def commit_kv_ref(
    node_k: torch.Tensor,  # [L, M, K, D]
    node_v: torch.Tensor,  # [L, M, K, Dv]
    k_pages: torch.Tensor,  # [L, n_pages, 64, K, D], written in place
    v_pages: torch.Tensor,  # [L, n_pages, 64, K, Dv], written in place
    slot_pages: torch.Tensor,  # [S, SP] int32
    slot_len: torch.Tensor,  # [S] int32
    accept_row: torch.Tensor,  # [S, A] int32, -1 padded
    accept_count: torch.Tensor,  # [S] int32
    moved: bool = False,
) -> None:
    """Plain PyTorch. `slot_len` is not changed: the caller does so, before (`moved`) or after."""
    if moved:
        slot_len = slot_len - accept_count
    step = torch.arange(accept_row.shape[1], device=accept_row.device)
    slot, i = (step < accept_count[:, None]).nonzero(as_tuple=True)
    position = slot_len.long()[slot] + i
    page = slot_pages[slot, position // PAGE].long()
    row = accept_row[slot, i].long()
    for node, pages in ((node_k, k_pages), (node_v, v_pages)):
        tokens = pages.view(pages.shape[0], -1, *pages.shape[3:])
        # `index_select` would copy all of a tensor whose layers are not contiguous to each other
        tokens.index_copy_(1, page * PAGE + position % PAGE, node[:, row])


def commit_kv_triton(
    node_k: torch.Tensor,
    node_v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_pages: torch.Tensor,
    slot_len: torch.Tensor,
    accept_row: torch.Tensor,
    accept_count: torch.Tensor,
    moved: bool = False,
) -> None:
    """One launch for all layers and slots."""

    import triton

    from csd.kernels.attention.triton.commit_kv import Accepted, Layers, commit_kv_kernel

    L, W, WV = node_k.shape[0], node_k[0, 0].numel(), node_v[0, 0].numel()
    S, A = accept_row.shape
    layers = Layers(node_k, node_v, k_pages, v_pages)
    commit_kv_kernel[(S, L, triton.cdiv(A, BLOCK_A))](
        layers=layers,
        slots=Accepted(slot_pages, slot_len, accept_row, accept_count),
        strides=Layers(*(x.stride(0) for x in layers)),
        slot_width=slot_pages.stride(0),
        A=A,
        MOVED=moved,
        W=W,
        WV=WV,
        PAGE=PAGE,
        BLOCK_A=BLOCK_A,
        BLOCK_W=min(1024, triton.next_power_of_2(max(W, WV))),
        num_warps=4,
    )


def _loop() -> tuple[Callable[..., bool], Callable]:
    from csd.kernels.attention.cpu import commit_kv as loop

    return (lambda *args: loop.reads_commit(*args[:4])), loop.commit_kv


_commit_kv = operator(
    "commit_kv", commit_kv_ref, commit_kv_triton, loop=_loop, written=("k_pages", "v_pages")
)


def commit_kv(
    node_k: torch.Tensor,  # [L, M, K, D]
    node_v: torch.Tensor,  # [L, M, K, Dv]
    k_pages: torch.Tensor,  # [L, n_pages, 64, K, D], written in place
    v_pages: torch.Tensor,  # [L, n_pages, 64, K, Dv], written in place
    slot_pages: torch.Tensor,  # [S, SP] int32
    slot_len: torch.Tensor,  # [S] int32
    accept_row: torch.Tensor,  # [S, A] int32, -1 padded
    accept_count: torch.Tensor,  # [S] int32
    moved: bool = False,
) -> None:
    """Copies the accepted rows of all layers to the pages, after their slots' tokens.

    moved: True if slot_len already counts the accepted rows, as after `advance_slots`.
    """
    if node_k.dim() != 4:
        raise ValueError(f"node_k must be [L, M, K, D], got {tuple(node_k.shape)}")
    L, M, K, D = node_k.shape
    kind, device, Dv = node_k.dtype, node_k.device, node_v.shape[-1]
    check_tensor("node_k", node_k, node_k.shape, None, device, rows_apart=True)
    check_tensor("node_v", node_v, (L, M, K, Dv), kind, device, rows_apart=True)
    check_tensor("k_pages", k_pages, (L, None, PAGE, K, D), kind, device, rows_apart=True)
    shape = (*k_pages.shape[:-1], Dv)
    check_tensor("v_pages", v_pages, shape, kind, device, rows_apart=True)
    for name, x, k in (("node_v", node_v, node_k), ("v_pages", v_pages, k_pages)):
        if L and Dv == D and x.stride() != k.stride():
            raise ValueError(f"{name} must have strides {k.stride()}, got {x.stride()}")
    check_tensor("slot_len", slot_len, (None,), torch.int32, device)
    S = slot_len.shape[0]
    for name, x in (("slot_pages", slot_pages), ("accept_row", accept_row)):
        check_tensor(name, x, (S, None), torch.int32, device)
    check_tensor("accept_count", accept_count, (S,), torch.int32, device)
    _commit_kv(
        node_k,
        node_v,
        k_pages,
        v_pages,
        slot_pages,
        slot_len,
        accept_row,
        accept_count,
        moved,
    )


def write_prompt(
    k: torch.Tensor,  # [.., R, K, D]
    v: torch.Tensor,  # [.., R, K, D]
    k_pages: torch.Tensor,  # [.., n_pages, 64, K, D], written in place
    v_pages: torch.Tensor,  # [.., n_pages, 64, K, D], written in place
    pages: torch.Tensor,  # [PP] int32, the group's row of prompt_pages
    start: int,
) -> None:
    """Writes rows 0..R-1 of a prompt chunk to places start.. of a page list; one layer or all."""
    position = torch.arange(start, start + k.shape[-3], device=k.device)
    index = pages[position // PAGE].long() * PAGE + position % PAGE
    write_rows(k, v, k_pages, v_pages, index)


def write_rows(
    k: torch.Tensor,  # [.., R, K, D]
    v: torch.Tensor,  # [.., R, K, Dv]
    k_pages: torch.Tensor,  # [.., n_pages, 64, K, D], written in place
    v_pages: torch.Tensor,  # [.., n_pages, 64, K, Dv], written in place
    index: torch.Tensor,  # [R] int64
) -> None:
    """Writes row r to token index[r] of all pages' tokens; one layer or all."""
    for rows, target in ((k, k_pages), (v, v_pages)):
        tokens = target.view(*target.shape[:-4], -1, *target.shape[-2:])
        tokens.index_copy_(tokens.dim() - 3, index, rows)
