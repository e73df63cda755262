"""The exact attention in Triton: near all keys gathered, with the same bits in every step."""

import pytest
import torch
from helpers.kernels.attention_cases import attention_case, dense_attention, laid_out
from helpers.targets import few, slow

from csd.kernels.attention import tree_attention_ref
from csd.kernels.attention.layout import TreeLayout
from csd.kernels.attention.triton import exact as module
from csd.kernels.attention.triton import exact_plan as plan_module
from csd.kernels.attention.triton.exact import (
    exact_attention,
    exact_attention_triton,
    plan_exact,
    plan_exact_ref,
    plan_exact_triton,
)
from csd.state.pool import MAX_DEPTH, Pool

pytestmark = pytest.mark.compiled

CASES = {
    "one-row": dict(trees=[{0: 1}], prompt=[0], committed=[0]),
    "empty-prompt": dict(trees=[{0: 5, 1: 3}], prompt=[0], committed=[90, 1]),
    "roots-only": dict(trees=[{0: 1, 1: 1, 2: 1}], prompt=[9], committed=[3, 0, 64]),
    "groups-out-of-order": dict(
        trees=[{3: 7, 1: 2}, {}, {0: 3, 4: 1}],
        prompt=[130, 5, 40],
        committed=[17, 150, 8, 0, 64],
        padding=3,
    ),
}


@pytest.fixture
def short_cuts(monkeypatch):
    """Prompts and bodies of a few pages have several cuts."""
    for name, pages in (("PROMPT_PAGES", 1), ("PROMPT_CUTS", 3), ("SLOT_PAGES", 2)):
        monkeypatch.setattr(plan_module, name, pages)


def within_eager(out, case):
    """No worse than attention computed in the inputs' dtype, but for a rounding of the weights."""
    exact, dtype = dense_attention(case), case["q"].dtype
    eager = max(
        (dense_attention(case, dtype, in_order).double() - exact).abs().max()
        for in_order in ((False, True) if dtype == torch.float32 else (False,))
    )
    largest = max(case[n].nan_to_num().abs().max().double() for n in ("v_pages", "node_v"))
    error, slack = (out.double() - exact).abs().max(), torch.finfo(dtype).eps * largest
    assert error <= eager + slack, f"error {error:.2e}, eager {eager:.2e}, slack {slack:.2e}"


@few(6)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "heads,D,dtype",
    [
        ((6, 2), 64, torch.float16),
        ((7, 1), 128, torch.float16),
        ((2, 2), 96, torch.float16),
        ((8, 1), 256, torch.float16),
        ((3, 1), 8, torch.float32),
        ((6, 2), 16, torch.bfloat16),
    ],
    ids=str,
)
def test_exact_attention(name, heads, D, dtype, poison, short_cuts):
    case = attention_case(**CASES[name], heads=heads, D=D, dtype=dtype)
    within_eager(exact_attention_triton(**laid_out(case)), case)
    within_eager(tree_attention_ref(**case), case)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("heads", [(2, 2), (14, 2)], ids=str)
@pytest.mark.parametrize("long", [False, True], ids=["", "long cuts"])
def test_the_work_list(name, heads, long, request):
    if not long:
        request.getfixturevalue("short_cuts")
    layout = laid_out(attention_case(**CASES[name], heads=heads))["layout"]
    want, got = (f(layout, *heads) for f in (plan_exact_ref, plan_exact_triton))
    assert torch.equal(got.total, want.total) and torch.equal(got.row, want.row)
    for a, b in ((got.segment, want.segment), (got.tail, want.tail)):
        # what is not written is not read
        assert torch.equal(torch.where(b == -1, -1, a), b)


def test_segments_cover_each_page_of_a_tile_once(short_cuts):
    case = attention_case([{0: 64, 1: 20}, {2: 40}], [300, 70], [400, 64, 130], (2, 1))
    layout = laid_out(case)["layout"]
    work = plan_exact_ref(layout, 2, 1)
    seen = {}
    for first, _, source, low, high, _ in work.segment[: int(work.total)].tolist():
        seen.setdefault((first, source), []).append((low, high))
    pages = {0: 5, 1: 2, 2 + 0: 6, 2 + 1: 1, 2 + 2: 2}
    assert {source for _, source in seen} == set(pages)
    for (_, source), found in seen.items():
        assert [low for low, _ in found] == [0, *(high for _, high in found[:-1])]
        assert found[-1][1] == pages[source]


def last_row(generated, depth, others, dtype, prompt=150, H=3, K=1, D=16, **how):
    """Attention of the row behind `generated` keys, of which the last `depth` + 1 are nodes.

    others: (committed, nodes) of more slots of the group in the same step.
    """
    g = torch.Generator().manual_seed(generated)

    def normal(*size):
        return torch.randn(size, generator=g).to(dtype)

    query, mine, prompt_keys = normal(H, D), normal(2, generated, K, D), normal(2, prompt, K, D)
    slots = [(generated - depth - 1, depth + 1), *others]
    committed, M = [n for n, _ in slots], sum(n for _, n in slots)
    # keys of others are not drawn before those of the row
    node = normal(2, M, K, D)
    counts = [prompt, *committed]
    need = [-(-n // 64) for n in counts]
    pages = torch.full((2, sum(need), 64, K, D), float("nan")).to(dtype)
    ids = torch.randperm(sum(need), generator=g).split(need)
    table = torch.full((len(counts), max(need)), -1, dtype=torch.int32)
    for i, n in enumerate(counts):
        table[i, : need[i]] = ids[i]
        keys = (prompt_keys, mine[:, :n])[i] if i < 2 else normal(2, n, K, D)
        whole = torch.full((2, need[i] * 64, K, D), float("nan")).to(dtype)
        whole[:, :n] = keys
        pages[:, ids[i].long()] = whole.view(2, -1, 64, K, D)
    pool, at = Pool.empty(M, len(slots), 1, 1), 0
    for s, (_, nodes) in enumerate(slots):
        pool.slot_start[s], pool.slot_nodes[s] = at, nodes
        pool.slot[at : at + nodes] = s
        # a chain as deep as a tree may be, and more leaves at its end
        chain = (1 << MAX_DEPTH) - 1
        words = [(2 << j) - 1 if j < MAX_DEPTH else chain | 1 << j for j in range(min(nodes, 63))]
        pool.ancestors[at : at + nodes] = torch.tensor(words + [-1 << 63 | chain] * (nodes == 64))
        at += nodes
    pool.group_start[1] = M
    node[:, : depth + 1] = mine[:, committed[0] :]
    q = normal(M, H, D)
    q[depth] = query
    lens = (torch.tensor(x, dtype=torch.int32) for x in ([prompt], committed))
    prompt_len, slot_len = lens
    layout = TreeLayout(
        table[:1].contiguous(),
        prompt_len,
        table[1:].contiguous(),
        slot_len,
        pool.slot,
        pool.ancestors,
        pool.slot_start,
        pool.slot_nodes,
        pool.group_start,
    )
    return exact_attention_triton(q, *node, *pages, layout, D**-0.5, **how)[depth]


# what else the step holds, and how deep in its tree the row is
STEPS = [
    (3, []),
    (16, []),
    (0, [(5, 1)]),
    (0, [(0, 23), (200, 3)]),
    (7, [(130, 23), (64, 3), (17, 1)]),
    (16, [(300, 4), (2, 64)]),
]
# deep in its tree, alone and among others of which one has rows in two tiles
DEEP = [STEPS[1], STEPS[4]]


def same_bits(generated, dtype, steps=STEPS, **how):
    """Yields whether a row has the bits that it has alone, for each of `steps`."""
    alone = last_row(generated, 0, [], dtype, programs=1, **how)
    assert not alone.isnan().any()
    for i, (depth, others) in enumerate(steps):
        depth = min(depth, generated - 1)
        row = last_row(generated, depth, others, dtype, programs=i % 3 + 1, **how)
        yield torch.equal(row, alone)


CHECKED = [(n, torch.float16) for n in (1, 17, 64, 81, 210)]


@few(2)
@pytest.mark.parametrize(
    "generated,dtype", [*CHECKED, (82, torch.bfloat16), (82, torch.float32)], ids=str
)
def test_a_row_has_the_same_bits_in_any_step(generated, dtype, ordered_products, short_cuts):
    assert all(same_bits(generated, dtype))


@few(1)
@pytest.mark.parametrize("reach", [dict(window=7), dict(window=100), dict(chunk=64)], ids=str)
def test_a_row_with_a_window_has_the_same_bits_in_any_step(reach, ordered_products, short_cuts):
    sinks = torch.tensor([-1.0, 0.5, 3.0])
    assert all(same_bits(100, torch.float16, DEEP, **reach, softcap=3.0, sinks=sinks))


@few(1)
@pytest.mark.parametrize("prompt", [0, 1, 200])
def test_a_prompt_may_be_of_any_length(prompt, ordered_products, short_cuts):
    assert all(same_bits(100, torch.float16, DEEP, prompt=prompt))


@slow
def test_heads_that_do_not_fill_a_tile(ordered_products):
    assert all(same_bits(100, torch.float16, H=14, K=2, D=64))


def test_it_needs_a_tail_that_no_tree_reaches_beyond(monkeypatch, ordered_products):
    monkeypatch.setattr(plan_module, "NEAR", 1)
    monkeypatch.setattr(plan_module, "TAIL", 128)
    monkeypatch.setattr(module, "TAIL", 128)
    # the row's body would reach into its nodes
    assert not all(same_bits(66, torch.float16))


def test_it_needs_cuts_that_do_not_follow_the_step(monkeypatch, ordered_products):
    whole = last_row(82, 0, [], torch.float16)
    monkeypatch.setattr(plan_module, "PROMPT_PAGES", 1)
    assert not torch.equal(last_row(82, 0, [], torch.float16), whole)


def test_operators():
    case = attention_case(**CASES["groups-out-of-order"], heads=(6, 2), dtype=torch.float32)
    for key in ("q", "node_k", "node_v", "k_pages", "v_pages"):
        case[key] = case[key].nan_to_num()
    layout = laid_out(case)["layout"]
    work = plan_exact(layout, 6, 2)
    assert torch.equal(work.row, plan_exact_ref(layout, 6, 2).row)
    want = tree_attention_ref(**case)
    assert torch.equal(exact_attention(**laid_out(case), work=work), want)
    assert torch.equal(exact_attention(**laid_out(case)), want)
    out = torch.empty_like(case["q"])
    args = *case.values(), [], out, *[None] * 4
    torch.library.opcheck(torch.ops.csd.exact_attention.default, args)
    torch.library.opcheck(torch.ops.csd.plan_exact.default, (*layout, 6, 2, None))


def test_errors():
    case = laid_out(attention_case(**CASES["roots-only"], heads=(2, 1), dtype=torch.float32))
    with pytest.raises(ValueError, match=r"scale must be positive, got -1\.0"):
        exact_attention(**case | {"scale": -1.0})
    with pytest.raises(ValueError, match=r"heads must be 1 to 64 times kv_heads, got 3 and 2"):
        plan_exact(case["layout"], 3, 2)
    work = plan_exact(case["layout"], 2, 1)
    with pytest.raises(ValueError, match=r"work\.total must have shape \(1,\), got \(3, 6\)"):
        exact_attention(**case, work=work._replace(total=work.row))


def test_without_rows():
    case = attention_case([{}], [5], [3], (2, 1), 16, dtype=torch.float32)
    assert exact_attention_triton(**laid_out(case)).shape == (0, 2, 16)
    with pytest.raises(ValueError, match="q must be float16, bfloat16 or float32, got torch"):
        exact_attention_triton(**laid_out(case | {"q": case["q"].double()}))
