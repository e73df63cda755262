"""Random trees, pages and an obviously right attention, for the tests of attention and commit."""

import torch

from csd.kernels.attention import TreeLayout
from csd.state.pool import Pool


def random_pool(trees, slots=None, padding=0, generator=None):
    """A pool of random trees. trees: per group, {slot: number of nodes}."""
    count = slots or 1 + max(s for group in trees for s in group)
    rows = sum(n for group in trees for n in group.values())
    pool = Pool.empty(rows + padding, count, len(trees), 4)
    row = 0
    for g, group in enumerate(trees):
        for s, n in group.items():
            pool.slot_start[s], pool.slot_nodes[s] = row, n
            for j in range(n):
                parent = -1 if j == 0 else int(torch.randint(j, (), generator=generator))
                word = 0 if parent < 0 else int(pool.ancestors[row + parent])
                word |= 1 << j
                pool.ancestors[row + j] = word - (1 << 64) if word >> 63 == 1 else word
                pool.parent[row + j] = -1 if parent < 0 else row + parent
                pool.slot[row + j] = s
                pool.token[row + j] = j
            row += n
        pool.group_start[g + 1] = row
    return pool


def random_tables(lengths, free, width=None):
    """A page table for token counts, taking pages off `free`."""
    need = [(n + 63) // 64 for n in lengths]
    table = torch.full((len(lengths), width or max([1, *need])), -1, dtype=torch.int32)
    for i, n in enumerate(need):
        for j in range(n):
            table[i, j] = free.pop()
    return table


def laid_out(case):
    """A case with the tensors of its layout in one record, as all but the reference take it."""
    layout = TreeLayout(*(case[name] for name in TreeLayout._fields))
    return {k: v for k, v in case.items() if k not in TreeLayout._fields} | {"layout": layout}


def attention_case(
    trees,
    prompt,
    committed,
    heads=(2, 1),
    D=16,
    dtype=torch.float64,
    padding=0,
    shuffle=True,
    seed=0,
):
    """Keyword arguments of tree_attention_ref; every cache token that is not valid is NaN."""
    g = torch.Generator().manual_seed(seed)
    pool = random_pool(trees, slots=len(committed), padding=padding, generator=g)
    H, K = heads
    pages = 2 + sum((n + 63) // 64 for n in (*prompt, *committed))
    order = torch.randperm(pages, generator=g) if shuffle else torch.arange(pages).flip(0)
    free = order.tolist()
    prompt_pages, slot_pages = random_tables(prompt, free), random_tables(committed, free)

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    k_pages = torch.full((pages, 64, K, D), float("nan"), dtype=dtype)
    v_pages = k_pages.clone()
    for table, lengths in ((prompt_pages, prompt), (slot_pages, committed)):
        for row, n in enumerate(lengths):
            for t in range(n):
                page = int(table[row, t // 64])
                k_pages[page, t % 64], v_pages[page, t % 64] = normal(K, D), normal(K, D)
    node_k, node_v = normal(pool.rows, K, D), normal(pool.rows, K, D)
    q = normal(pool.rows, H, D)
    for x in (q, node_k, node_v):
        x[pool.slot < 0] = float("nan")
    return dict(
        q=q,
        node_k=node_k,
        node_v=node_v,
        k_pages=k_pages,
        v_pages=v_pages,
        prompt_pages=prompt_pages,
        prompt_len=torch.tensor(prompt, dtype=torch.int32),
        slot_pages=slot_pages,
        slot_len=torch.tensor(committed, dtype=torch.int32),
        slot=pool.slot,
        ancestors=pool.ancestors,
        slot_start=pool.slot_start,
        slot_nodes=pool.slot_nodes,
        group_start=pool.group_start,
        scale=D**-0.5,
    )


def dense_attention(case, dtype=torch.float64, in_order=False):
    """Row by row, every key gathered; scores and sums in `dtype`.

    in_order: the products of a score are added one after another, as a thread of a GPU does.
    """
    q, H = case["q"], case["q"].shape[1]
    K = case["node_k"].shape[1]
    out = torch.zeros_like(q, dtype=dtype)
    for m in range(q.shape[0]):
        s = int(case["slot"][m])
        if s < 0:
            continue
        g = int((case["group_start"][1:] <= m).sum())
        keys, values = [], []
        for table, length in (
            (case["prompt_pages"][g], case["prompt_len"][g]),
            (case["slot_pages"][s], case["slot_len"][s]),
        ):
            for t in range(int(length)):
                page = int(table[t // 64])
                keys.append(case["k_pages"][page, t % 64])
                values.append(case["v_pages"][page, t % 64])
        for j in range(int(case["slot_nodes"][s])):
            if int(case["ancestors"][m]) >> j & 1:
                keys.append(case["node_k"][int(case["slot_start"][s]) + j])
                values.append(case["node_v"][int(case["slot_start"][s]) + j])
        k, v = torch.stack(keys).to(dtype), torch.stack(values).to(dtype)
        for h in range(H):
            kh = h // (H // K)
            if in_order:
                products = (k[:, kh] * q[m, h].to(dtype)).numpy()
                score = torch.from_numpy(products.cumsum(1, dtype=products.dtype)[:, -1].copy())
            else:
                score = k[:, kh] @ q[m, h].to(dtype)
            p = (score * case["scale"]).softmax(0)
            out[m, h] = p @ v[:, kh]
    return out


def within_eager(out, case):
    """No worse than attention computed in the inputs' dtype, but for a rounding of the weights."""
    exact, dtype = dense_attention(case), case["q"].dtype
    eager = (dense_attention(case, dtype).double() - exact).abs().max()
    if dtype == torch.float32:
        # no order of summation is promised
        eager = max(eager, (dense_attention(case, dtype, True).double() - exact).abs().max())
    largest = max(case[n].nan_to_num().abs().max().double() for n in ("v_pages", "node_v"))
    slack = torch.finfo(out.dtype).eps * largest
    error = (out.double() - exact).abs().max()
    assert error <= eager + slack, f"error {error:.2e}, eager {eager:.2e}, slack {slack:.2e}"
