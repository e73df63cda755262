"""Attention with windows, chunks, caps, sinks and short values, against all keys gathered."""

import pytest
import torch
from helpers.kernels.attention_cases import attention_case
from property_cases import CASES, PROPERTIES, D, dense

from csd.kernels.attention import tree_attention_ref
from csd.kernels.attention.prompt import attend_chunk, attend_visible, tokens_of, visible_keys
from csd.kernels.attention.reference import Properties


def places(pages, tokens):
    return torch.tensor([int(pages[t // 64]) * 64 + t % 64 for t in range(tokens)])


@pytest.mark.parametrize("named", PROPERTIES)
@pytest.mark.parametrize("name", CASES)
def test_rows_of_a_step(name, named):
    heads = (6, 2)
    case = attention_case(**CASES[name], heads=heads, D=D)
    given = dict(PROPERTIES[named])
    sinks = torch.randn(6, dtype=torch.float64) if given.pop("sinks", False) else None
    value_dim = given.pop("value_dim", D)
    want = dense(case, heads, 0.4, sinks=sinks, value_dim=value_dim, **given)
    for name in ("node_v", "v_pages"):
        case[name] = case[name][..., :value_dim]
    got = tree_attention_ref(**case | dict(scale=0.4, sinks=sinks), **given)
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
            q=q[r : r + 1],
            prompt_len=torch.tensor([start + r]),
            node_k=empty + case["k_pages"][at],
            node_v=empty + case["v_pages"][at],
        )
        want.append(dense(alone, heads, 0.4, sinks=sinks, value_dim=value_dim, **given))
    p = Properties(2, D, value_dim, 0.4, **given)
    keys = visible_keys(places(pages, total), start, p.window, p.chunk)
    got = attend_visible(q, case["k_pages"], case["v_pages"][..., :value_dim], keys, p, sinks)
    torch.testing.assert_close(got, torch.cat(want))


def test_a_prompts_tokens_without_properties_have_the_plain_attention():
    case = attention_case([{0: 1}], [40], [0], heads=(6, 2), D=D)
    q = torch.randn(8, 6, D, dtype=torch.float64)
    cache, pages = (case["k_pages"], case["v_pages"]), case["prompt_pages"][0]
    keys = visible_keys(places(pages, 40), 32, None, None)
    got = attend_visible(q, *cache, keys, Properties(2, D, D, 0.4))
    k, v = (tokens_of(x, pages[:1])[:40] for x in cache)
    torch.testing.assert_close(got, attend_chunk(q, k, v, 32, 0.4))


def test_sixteen_bits_are_summed_in_thirty_two():
    case = attention_case(**CASES["empty-prompt"], heads=(6, 2), D=D, dtype=torch.bfloat16)
    wide = {
        k: v.double() if v.dtype == torch.bfloat16 else v
        for k, v in case.items()
        if torch.is_tensor(v)
    }
    named = dict(scale=0.4, window=30, softcap=2.0)
    got, want = (tree_attention_ref(**c | named) for c in (case, wide | dict(scale=0.4)))
    assert got.dtype == torch.bfloat16
    assert (got.double() - want).abs().max() <= torch.finfo(torch.bfloat16).eps * want.abs().max()
