"""Keys and values behind the tokens already in the pages: accepted nodes, and prompt chunks.

    commit_kv      pages[l, place slot_len[s] + i of slot s] = node[l, accept_row[s, i]]
                   for i < accept_count[s] and every layer l
    write_prompt   pages[.., place start + r of a page list] = chunk[.., r]

Place p of a page table is token p % 64 of page table[p // 64]. Nodes live in a scratch of their
own, so source and target never overlap.
"""

import torch

PAGE = 64


def commit_kv_ref(
    node_k: torch.Tensor,  # [L, M, K, D]
    node_v: torch.Tensor,  # [L, M, K, D]
    k_pages: torch.Tensor,  # [L, n_pages, 64, K, D], written in place
    v_pages: torch.Tensor,  # [L, n_pages, 64, K, D], written in place
    slot_pages: torch.Tensor,  # [S, SP] int32
    slot_len: torch.Tensor,  # [S] int32
    accept_row: torch.Tensor,  # [S, A] int32, -1 padded
    accept_count: torch.Tensor,  # [S] int32
) -> None:
    """Plain PyTorch. `slot_len` is left as it is: the caller moves it when the step is done."""
    step = torch.arange(accept_row.shape[1], device=accept_row.device)
    slot, i = (step < accept_count[:, None]).nonzero(as_tuple=True)
    place = slot_len.long()[slot] + i
    page = slot_pages[slot, place // PAGE].long()
    row = accept_row[slot, i].long()
    for node, pages in ((node_k, k_pages), (node_v, v_pages)):
        tokens = pages.view(pages.shape[0], -1, *pages.shape[3:])
        tokens.index_copy_(1, page * PAGE + place % PAGE, node.index_select(1, row))


def write_prompt(
    k: torch.Tensor,  # [.., R, K, D]
    v: torch.Tensor,  # [.., R, K, D]
    k_pages: torch.Tensor,  # [.., n_pages, 64, K, D], written in place
    v_pages: torch.Tensor,  # [.., n_pages, 64, K, D], written in place
    pages: torch.Tensor,  # [PP] int32, the group's row of prompt_pages
    start: int,
) -> None:
    """Puts rows 0..R-1 of a prompt chunk at places start.. of a page list; one layer or all."""
    place = torch.arange(start, start + k.shape[-3], device=k.device)
    index = pages[place // PAGE].long() * PAGE + place % PAGE
    for chunk, target in ((k, k_pages), (v, v_pages)):
        tokens = target.view(*target.shape[:-4], -1, *target.shape[-2:])
        tokens.index_copy_(tokens.dim() - 3, index, chunk)


commit_kv = commit_kv_ref
