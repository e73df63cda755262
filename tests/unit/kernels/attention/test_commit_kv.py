"""Keys and values of accepted nodes, moved into pages: against copies token by token."""

import pytest
import torch
from helpers.kernels.commit_cases import commit_case
from helpers.targets import pairs, values

from csd.kernels.attention.commit_kv import commit_kv, commit_kv_ref, commit_kv_triton, write_prompt
from csd.kernels.common.cpu import compiles

pytestmark = pytest.mark.compiled

RUNS = [commit_kv_ref, commit_kv_triton, commit_kv]
if compiles():
    from csd.kernels.attention.cpu.commit_kv import commit_kv as commit_kv_loop

    RUNS.append(commit_kv_loop)

CASES = {
    "nothing-accepted": ([0, 5], [0, 0]),
    "page-ends": ([63, 64, 0, 126], [1, 1, 17, 5]),
    "all-accepted": ([3], [17]),
    "dead-slots": ([0, 70, 0, 0, 9], [0, 2, 0, 3, 0]),
}


def copied(case):
    """Token by token."""
    k, v = case["k_pages"].clone(), case["v_pages"].clone()
    for s, count in enumerate(case["accept_count"].tolist()):
        for i in range(count):
            place = int(case["slot_len"][s]) + i
            page, row = case["slot_pages"][s, place // 64], case["accept_row"][s, i]
            k[:, page, place % 64] = case["node_k"][:, row]
            v[:, page, place % 64] = case["node_v"][:, row]
    return k, v


def same(a, b):
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", CASES)
def test_commit_kv(run, name):
    case = commit_case(*CASES[name])
    k, v = copied(case)
    before = case["slot_len"].clone()
    run(**case)
    assert same(case["k_pages"], k) and same(case["v_pages"], v)
    assert torch.equal(case["slot_len"], before)


@pytest.mark.parametrize("run", RUNS)
def test_lengths_that_count_the_accepted_rows(run):
    case = commit_case([60, 2], [5, 1])
    k, v = copied(case)
    case["slot_len"] += case["accept_count"]
    run(**case, moved=True)
    assert same(case["k_pages"], k) and same(case["v_pages"], v)


@pairs
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("heads", [(1, 96), (8, 256)], ids=str)
@pytest.mark.parametrize("run", RUNS[1:])
def test_commit_kv_widths(run, dtype, heads):
    case = commit_case([60, 2], [5, 1], heads, dtype)
    k, v = copied(case)
    run(**case)
    assert same(case["k_pages"], k) and same(case["v_pages"], v)


@pytest.mark.parametrize("size", [5, 40])
@pytest.mark.parametrize("run", RUNS)
def test_values_of_another_size(run, size):
    case = commit_case([60, 2], [5, 1])
    other = commit_case([60, 2], [5, 1], heads=(2, size))
    case |= {"node_v": other["node_v"], "v_pages": other["v_pages"]}
    k, v = copied(case)
    run(**case)
    assert same(case["k_pages"], k) and same(case["v_pages"], v)


def test_commit_kv_op():
    case = commit_case(*CASES["page-ends"])
    case["k_pages"].zero_(), case["v_pages"].zero_()
    torch.library.opcheck(torch.ops.csd.commit_kv.default, tuple(case.values()))


@pytest.mark.parametrize(
    "name,value,message",
    [
        ("node_v", torch.zeros(3, 40, 2, 8), r"v_pages must have shape \(3, 20, 64, 2, 8\), got"),
        ("k_pages", torch.zeros(3, 20, 32, 2, 24), r"k_pages must have shape \(3, \*, 64, 2, 24\)"),
        ("accept_count", torch.zeros(1), r"accept_count must have shape \(4,\), got \(1,\)"),
        ("accept_row", torch.zeros(4, 17), r"accept_row must be torch\.int32, got torch\.float32"),
        ("v_pages", torch.zeros(3, 20, 64, 2, 24).half(), r"v_pages must be torch\.float32, got"),
        ("node_k", torch.zeros(40, 2, 24), r"node_k must be \[L, M, K, D\], got \(40, 2, 24\)"),
        ("accept_row", torch.zeros(17, 4).int().T, "accept_row must be contiguous, got strides"),
    ],
)
def test_commit_kv_errors(name, value, message):
    case = commit_case(*CASES["page-ends"])
    with pytest.raises(ValueError, match=message):
        commit_kv(**(case | {name: value}))


@values
@pytest.mark.parametrize("layers", [(), (2,)], ids=["one-layer", "all-layers"])
@pytest.mark.parametrize("start,rows", [(0, 1), (0, 130), (63, 2), (64, 64), (100, 1)])
def test_write_prompt(layers, start, rows):
    k, v = torch.randn(*layers, rows, 2, 8), torch.randn(*layers, rows, 2, 8)
    pages = torch.tensor([4, 1, 3, -1], dtype=torch.int32)
    k_pages = torch.full((*layers, 5, 64, 2, 8), float("nan"))
    v_pages = k_pages.clone()
    want_k, want_v = k_pages.clone(), v_pages.clone()
    for r in range(rows):
        at = (..., int(pages[(start + r) // 64]), (start + r) % 64, slice(None), slice(None))
        want_k[at], want_v[at] = k[..., r, :, :], v[..., r, :, :]
    write_prompt(k, v, k_pages, v_pages, pages, start)
    assert same(k_pages, want_k) and same(v_pages, want_v)
