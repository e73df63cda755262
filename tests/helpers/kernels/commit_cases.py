"""Accepted nodes, and pages to move their keys and values into."""

import torch
from helpers.kernels.attention_cases import random_tables


def commit_case(lengths, counts, heads=(2, 24), dtype=torch.float32, A=17):
    g = torch.Generator().manual_seed(1)
    L, M, (K, D) = 3, 40, heads
    free = torch.randperm(20, generator=g).tolist()
    room = [n + c for n, c in zip(lengths, counts, strict=True)]
    accept_row = torch.full((len(counts), A), -1, dtype=torch.int32)
    order = iter(torch.randperm(M, generator=g).tolist())
    for s, count in enumerate(counts):
        accept_row[s, :count] = torch.tensor([next(order) for _ in range(count)])
    # rows of a scratch that is longer than the pool
    node_k, node_v = (torch.randn(L, M + 3, K, D, generator=g).to(dtype) for _ in range(2))
    return dict(
        node_k=node_k[:, :M],
        node_v=node_v[:, :M],
        k_pages=torch.full((L, 20, 64, K, D), float("nan"), dtype=dtype),
        v_pages=torch.full((L, 20, 64, K, D), float("nan"), dtype=dtype),
        slot_pages=random_tables(room, free),
        slot_len=torch.tensor(lengths, dtype=torch.int32),
        accept_row=accept_row,
        accept_count=torch.tensor(counts, dtype=torch.int32),
    )
