"""A row's attention has the same bits whatever else the step holds."""

import pytest
import torch
from helpers.targets import few, slow
from numba import njit

from csd.kernels.attention.cpu import attention
from csd.kernels.numba.isa import instructions
from csd.kernels.numba.math import added
from csd.state.pool import MAX_DEPTH, Pool

H, K = 6, 2


def tables(lengths):
    """A page table and how many pages it takes."""
    need = [-(-n // 64) for n in lengths]
    table = torch.full((len(lengths), max([1, *need])), -1, dtype=torch.int32)
    ids = iter(torch.randperm(sum(need), generator=torch.manual_seed(9)).tolist())
    for i, n in enumerate(need):
        table[i, :n] = torch.tensor([next(ids) for _ in range(n)], dtype=torch.int32)
    return table, sum(need)


def last_row(
    generated,
    depth,
    others,
    dtype,
    prompt=70,
    attend=attention.tree_attention,
    D=16,
    vanishing=False,
):
    """Attention of the row behind `generated` keys, of which the last `depth` + 1 are nodes.

    others: (committed, nodes) of more slots in the same step; vanishing: all keys weigh the same,
    and the values' sum is 0 but for its roundings, which are then the result.
    """
    torch.manual_seed(generated)
    query = torch.randn(H, D).to(dtype)
    keys, values = torch.randn(2, generated, K, D).to(dtype)
    prompt_k, prompt_v = torch.randn(2, prompt, K, D).to(dtype)
    if vanishing:
        query.zero_()
        count = (prompt + generated) // 2
        half = torch.randn(count, K, D) * 2.0 ** torch.randint(20, (count, K, D))
        both = torch.cat([half, -half[torch.randperm(count)], torch.zeros(1, K, D)])
        values, prompt_v = both[: prompt + generated].to(dtype).split((generated, prompt))
    slots = [(generated - depth - 1, depth + 1), *others]
    committed = [n for n, _ in slots]
    table, pages = tables([prompt, *committed])
    M = sum(n for _, n in slots)
    k_pages, v_pages = torch.full((2, pages, 64, K, D), float("nan")).to(dtype)
    node_k, node_v = torch.randn(2, M, K, D).to(dtype)
    q = torch.randn(M, H, D).to(dtype)

    def write(row, k, v):
        for t in range(len(k)):
            page = int(table[row, t // 64])
            k_pages[page, t % 64], v_pages[page, t % 64] = k[t], v[t]

    write(0, prompt_k, prompt_v)
    write(1, keys[: committed[0]], values[: committed[0]])
    for row, n in enumerate(committed[1:], 2):
        write(row, *torch.randn(2, n, K, D).to(dtype))
    pool = Pool.empty(M, len(slots), 1, 1)
    at = 0
    for s, (_, nodes) in enumerate(slots):
        pool.slot_start[s], pool.slot_nodes[s] = at, nodes
        pool.slot[at : at + nodes] = s
        # a chain as deep as a tree may be, and more leaves at its end
        chain = (1 << MAX_DEPTH) - 1
        words = [(2 << j) - 1 if j < MAX_DEPTH else chain | 1 << j for j in range(nodes)]
        pool.ancestors[at : at + nodes] = torch.tensor(words)
        at += nodes
    pool.group_start[1] = M
    node_k[: depth + 1], node_v[: depth + 1] = keys[committed[0] :], values[committed[0] :]
    q[depth] = query
    out = attend(
        q,
        node_k,
        node_v,
        k_pages,
        v_pages,
        prompt_pages=table[:1],
        prompt_len=torch.tensor([prompt], dtype=torch.int32),
        slot_pages=table[1:],
        slot_len=torch.tensor(committed, dtype=torch.int32),
        slot=pool.slot,
        ancestors=pool.ancestors,
        slot_start=pool.slot_start,
        slot_nodes=pool.slot_nodes,
        group_start=pool.group_start,
        scale=D**-0.5,
    )
    return out[depth]


# what else the step holds, and how deep in its tree the row is
STEPS = [
    (3, []),
    (16, []),
    (0, [(5, 1)]),
    (0, [(400, 1), (0, 9)]),
    (7, [(130, 40), (64, 3), (17, 1)]),
    (16, [(300, 17), (2, 60)]),
]


def same_bits(generated, dtype, prompt=70, attend=attention.tree_attention, **more):
    alone = last_row(generated, 0, [], dtype, prompt, attend, **more)
    rows = (
        last_row(generated, min(depth, generated - 1), others, dtype, prompt, attend, **more)
        for depth, others in STEPS
    )
    return [torch.equal(row, alone) for row in rows]


@few(6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("generated", [1, 2, 17, 18, 64, 70, 81, 82, 210, 350])
def test_a_row_has_the_same_bits_in_any_step(generated, dtype):
    assert all(same_bits(generated, dtype))


@pytest.mark.parametrize("prompt", [0, 1, 2, 3, 5, 63, 300])
def test_a_prompt_may_be_of_any_length(prompt):
    assert all(same_bits(20, torch.float32, prompt))


@few(10)
@pytest.mark.parametrize("generated", [1, 2, 17, 18, 48, 49, 64, 70, 81, 210, 351])
@pytest.mark.parametrize("prompt", [0, 3, 70])
@pytest.mark.parametrize("by", instructions(torch.bfloat16))
def test_values_are_added_in_the_order_of_their_keys(generated, prompt, by, monkeypatch):
    """Committed keys are paired from a page's start, nodes from the first one, hidden or not."""
    kinds = attention.attention_kinds(torch.bfloat16, 64, by)
    monkeypatch.setattr(attention, "attention_kinds", lambda dtype, D: kinds)
    attend = attention.tree_attention
    for vanishing in (False, True):
        same = same_bits(generated, torch.bfloat16, prompt, attend, D=64, vanishing=vanishing)
        assert all(same)


def broken(attend=attention.tree_attention):
    """True if some step of float32 gives a row other bits."""
    return not all(all(same_bits(n, torch.float32, attend=attend)) for n in (18, 70, 210, 350))


@slow
def test_the_loop_needs_weights_added_by_position(monkeypatch):
    softmax = attention.softmax

    @njit
    def apart(x, scale, old, nodes, word, sums):
        peak = softmax(x, scale, old, nodes, word, sums)[1]
        return added(x[:old]) + added(x[old : old + nodes]), peak

    monkeypatch.setattr(attention, "softmax", apart)
    attend = njit(attention.attend_rows.part.py_func)
    monkeypatch.setattr(attention, "attend_rows", lambda numbers, *args: attend(0, 1, *args))
    assert broken(attention.tree_attention)
