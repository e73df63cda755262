"""Attention with windows, chunks, caps, sinks and short values, against all keys gathered."""

import math

import pytest
import torch
from attention_cases import attention_case

from csd.kernels.chunk_attention import chunk_attention
from csd.kernels.chunk_properties import chunk_attention_properties
from csd.kernels.tree_attention import tree_attention_ref
from csd.kernels.tree_attention.placed_keys import place_keys
from csd.kernels.tree_attention.properties import (
    Properties,
    as_heads,
    tree_attention_properties,
)

LAYOUT = (
    "prompt_pages", "prompt_len", "slot_pages", "slot_len", "slot", "ancestors", "slot_start",
    "slot_nodes", "group_start",
)  # fmt: skip
CASES = {
    "one-row": dict(trees=[{0: 1}], prompt=[0], committed=[0]),
    "empty-prompt": dict(trees=[{0: 5, 1: 3}], prompt=[0], committed=[70, 1]),
    "empty-committed": dict(trees=[{0: 4}], prompt=[65], committed=[0]),
    "64-nodes": dict(trees=[{0: 64}], prompt=[3], committed=[2]),
    "groups-out-of-order": dict(
        trees=[{3: 7, 1: 2}, {}, {0: 3, 4: 1}],
        prompt=[130, 5, 40],
        committed=[17, 129, 8, 0, 64],
        padding=3,
    ),
}
PROPERTIES = {
    "none": {},
    "window-1": dict(window=1),
    "window-7": dict(window=7),
    "window-100": dict(window=100),
    "chunk-8": dict(chunk=8),
    "chunk-64": dict(chunk=64),
    "cap": dict(softcap=1.5),
    "sinks": dict(sinks=True),
    "short-values": dict(value_dim=11),
    "all": dict(window=20, softcap=2.0, sinks=True, value_dim=11),
}
D = 16


def dense(case, heads, scale, window=None, chunk=None, softcap=None, sinks=None, value_dim=D):
    """Row by row and head by head, from the definition."""
    H, K = heads
    rows = case["q"].shape[0]
    out = torch.zeros(rows, H, value_dim, dtype=torch.float64)
    for m in range(rows):
        s = int(case["slot"][m])
        if s < 0:
            continue
        g = int((case["group_start"][1:] <= m).sum())
        prompt, old = int(case["prompt_len"][g]), int(case["slot_len"][s])
        word = int(case["ancestors"][m]) % 2**64
        position = prompt + old + word.bit_count() - 1
        keys = []
        for table, length, first in (
            (case["prompt_pages"][g], prompt, 0), (case["slot_pages"][s], old, prompt),
        ):  # fmt: skip
            for t in range(length):
                at = int(table[t // 64]), t % 64
                keys.append((first + t, case["k_pages"][at], case["v_pages"][at]))
        start = int(case["slot_start"][s])
        for j in range(int(case["slot_nodes"][s])):
            if word >> j & 1:
                above = int(case["ancestors"][start + j]) % 2**64
                at = prompt + old + above.bit_count() - 1
                keys.append((at, case["node_k"][start + j], case["node_v"][start + j]))
        for h in range(H):
            total, sums = 0.0, torch.zeros(value_dim, dtype=torch.float64)
            for at, k, v in keys:
                if window is not None and position - at >= window:
                    continue
                if chunk is not None and position // chunk != at // chunk:
                    continue
                score = scale * float(k[h // (H // K)] @ case["q"][m, h])
                if softcap is not None:
                    score = softcap * math.tanh(score / softcap)
                total += math.exp(score)
                sums += math.exp(score) * v[h // (H // K), :value_dim]
            out[m, h] = sums / (total + (math.exp(sinks[h]) if sinks is not None else 0.0))
    return out


@pytest.mark.parametrize("named", PROPERTIES)
@pytest.mark.parametrize("name", CASES)
def test_rows_of_a_step(name, named):
    heads = (6, 2)
    case = attention_case(**CASES[name], heads=heads, D=D)
    given = dict(PROPERTIES[named])
    sinks = torch.randn(6, dtype=torch.float64) if given.pop("sinks", False) else None
    value_dim = given.pop("value_dim", D)
    want = dense(case, heads, 0.4, sinks=sinks, value_dim=value_dim, **given)
    groups = place_keys(**{x: case[x] for x in LAYOUT})
    tensors = (case[x] for x in ("q", "node_k", "node_v", "k_pages", "v_pages"))
    q, node_k, node_v, k_pages, v_pages = tensors
    got = tree_attention_properties(
        q, node_k, node_v[..., :value_dim], k_pages, v_pages[..., :value_dim], groups,
        Properties(2, D, value_dim, 0.4, **given), sinks,
    )  # fmt: skip
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("named", PROPERTIES)
@pytest.mark.parametrize(("start", "rows"), [(0, 5), (0, 70), (61, 9), (128, 3)])
def test_tokens_of_a_prompt(start, rows, named):
    """A prompt's tokens are a chain of nodes behind those before them."""
    heads, total = (6, 2), start + rows
    case = attention_case([{0: 1}], [total], [0], heads=heads, D=D)
    given = dict(PROPERTIES[named])
    sinks = torch.randn(6, dtype=torch.float64) if given.pop("sinks", False) else None
    value_dim = given.pop("value_dim", D)
    q = torch.randn(rows, 6, D, dtype=torch.float64)
    want = []
    pages, empty = case["prompt_pages"][0], torch.zeros(1, 2, D, dtype=torch.float64)
    for r in range(rows):
        at = int(pages[(start + r) // 64]), (start + r) % 64
        alone = case | dict(
            q=q[r : r + 1], prompt_len=torch.tensor([start + r]),
            node_k=empty + case["k_pages"][at], node_v=empty + case["v_pages"][at],
        )  # fmt: skip
        want.append(dense(alone, heads, 0.4, sinks=sinks, value_dim=value_dim, **given))
    got = chunk_attention_properties(
        q, case["k_pages"], case["v_pages"][..., :value_dim], pages, start,
        Properties(2, D, value_dim, 0.4, **given), sinks,
    )  # fmt: skip
    torch.testing.assert_close(got, torch.cat(want))


def test_without_properties_both_are_the_plain_attention():
    case = attention_case(**CASES["groups-out-of-order"], heads=(6, 2), D=D)
    groups = place_keys(**{x: case[x] for x in LAYOUT})
    tensors = [case[x] for x in ("q", "node_k", "node_v", "k_pages", "v_pages")]
    plain = Properties(2, D, D, case["scale"])
    got = tree_attention_properties(*tensors, groups, plain)
    torch.testing.assert_close(got, tree_attention_ref(**case))
    case = attention_case([{0: 1}], [40], [0], heads=(6, 2), D=D)
    q = torch.randn(8, 6, D, dtype=torch.float64)
    args = q, case["k_pages"], case["v_pages"], case["prompt_pages"][0], 32
    got = chunk_attention_properties(*args, Properties(2, D, D, 0.4))
    torch.testing.assert_close(got, chunk_attention(*args, 0.4))


def test_sixteen_bits_are_summed_in_thirty_two():
    case = attention_case(**CASES["empty-prompt"], heads=(6, 2), D=D, dtype=torch.bfloat16)
    wide = {k: v.double() if v.dtype == torch.bfloat16 else v for k, v in case.items()
            if torch.is_tensor(v)}  # fmt: skip
    groups = place_keys(**{x: case[x] for x in LAYOUT})
    names = ("q", "node_k", "node_v", "k_pages", "v_pages")
    p = Properties(2, D, D, 0.4, window=30, softcap=2.0)
    got, want = (
        tree_attention_properties(*(c[x] for x in names), groups, p) for c in (case, wide)
    )
    assert got.dtype == torch.bfloat16
    assert (got.double() - want).abs().max() <= torch.finfo(torch.bfloat16).eps * want.abs().max()


def test_tokens_wider_than_a_call_are_viewed():
    x = torch.arange(2 * 3 * 24).view(2, 3, 1, 24)
    found = as_heads(x, 2, 8)
    assert found.shape == (2, 3, 2, 8)
    assert torch.equal(found.flatten(2), x[:, :, 0, :16])
    found.zero_()
    assert x[:, :, :, :16].eq(0).all() and x[:, :, :, 16:].ne(0).all()
