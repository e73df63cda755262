"""Calls with windows, chunks, caps, sinks and short values, and an obviously right attention."""

import torch
from helpers.kernels.attention_cases import attention_case

from csd.kernels.attention.reference import tree_attention_ref

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
    """Row by row, from the definition."""
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
            (case["prompt_pages"][g], prompt, 0),
            (case["slot_pages"][s], old, prompt),
        ):
            for t in range(length):
                at = int(table[t // 64]), t % 64
                keys.append((first + t, case["k_pages"][at], case["v_pages"][at]))
        start = int(case["slot_start"][s])
        for j in range(int(case["slot_nodes"][s])):
            if word >> j & 1:
                above = int(case["ancestors"][start + j]) % 2**64
                at = prompt + old + above.bit_count() - 1
                keys.append((at, case["node_k"][start + j], case["node_v"][start + j]))
        keys = [
            (k, v)
            for at, k, v in keys
            if (window is None or position - at < window)
            and (chunk is None or position // chunk == at // chunk)
        ]
        k, v = (torch.stack(x).double() for x in zip(*keys, strict=True))
        # [K, H / K, T]
        score = torch.einsum("tkd,ked->ket", k, case["q"][m].double().view(K, H // K, -1)) * scale
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        weight = score.exp()
        total = weight.sum(-1)
        if sinks is not None:
            total += sinks.double().exp().view(K, H // K)
        sums = torch.einsum("ket,tkd->ked", weight, v[..., :value_dim])
        out[m] = (sums / total[..., None]).view(H, -1)
    return out


def property_case(name, named, heads=(6, 2), dtype=torch.float64, D=D, **more):
    """Keyword arguments of `tree_attention_ref`, and the float64 result."""
    given = PROPERTIES[named] | more
    case = attention_case(**CASES[name], heads=heads, D=D, dtype=dtype) | {"scale": 0.4}
    if given.pop("sinks", False):
        given["sinks"] = torch.randn(heads[0], generator=torch.manual_seed(1))
    size = given.pop("value_dim", D)
    case |= {
        x: torch.cat((case[x], case[x].flip(-1)), -1)[..., :size].contiguous()
        for x in ("node_v", "v_pages")
    }
    return case | given, dense(case, heads, 0.4, value_dim=size, **given)


def no_farther_than_the_reference(got, case, want):
    """Twice its error in the case's dtype, and a rounding of the result's largest number."""
    there = case["slot"] >= 0
    off = (tree_attention_ref(**case).double() - want)[there].abs().max()
    error = (got.double() - want)[there].abs().max()
    limit = 2 * off + torch.finfo(got.dtype).eps * want.abs().max()
    assert error <= limit, f"error {error:.2e}, limit {limit:.2e}"
    assert not got[~there].any()
