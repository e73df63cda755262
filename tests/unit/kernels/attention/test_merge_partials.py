"""Merging partials of attention: the kernel against the reference, that against one softmax."""

import pytest
import torch
from helpers.kernels.merge_cases import merge_case

from csd.kernels.attention.triton.merge import (
    merge_partials,
    merge_partials_ref,
    merge_partials_triton,
)

pytestmark = pytest.mark.compiled


@pytest.mark.parametrize("run", [merge_partials_triton, merge_partials])
@pytest.mark.parametrize("each", [1, 3, 7, 8])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_merge_partials(run, each, sinks):
    case = merge_case(each)
    if sinks:
        case["sinks"] = torch.linspace(-3, 3, 2 * each)
    want = merge_partials_ref(**(case | {"out": torch.empty(4, 2 * each, 24).double()}))
    assert run(**case) is case["out"]
    # 3 partials at most: a rescaling, a product and a sum each, and the roundings of 2^-d, of which
    # that of d weighs d 2^-d < 1
    limit = 3 * 4 * torch.finfo(torch.float32).eps * case["o"].nan_to_num().abs().max()
    assert (case["out"].double() - want).abs().max() <= limit
    assert (case["out"][3] == 0).all()


def test_merge_partials_ref():
    """Against the softmax of all scores at once."""
    score, v = torch.randn(12, dtype=torch.float64), torch.randn(12, 5, dtype=torch.float64)
    parts = [slice(0, 4), slice(4, 5), slice(5, 12)]
    o = torch.stack([torch.softmax(score[p], 0) @ v[p] for p in parts])[None]
    lse = torch.stack([score[p].logsumexp(0) for p in parts])[None] / torch.tensor(2).log()
    merge = torch.tensor([[0, 2, 2, 1]], dtype=torch.int32)
    got = merge_partials_ref(o, lse, merge, 1, torch.empty(1, 1, 5, dtype=torch.float64))
    torch.testing.assert_close(got[0, 0], torch.softmax(score, 0) @ v)
    sink = torch.tensor([0.7], dtype=torch.float64)
    got = merge_partials_ref(o, lse, merge, 1, torch.empty_like(got), sink)
    weight = torch.softmax(torch.cat((score, sink)), 0)[:-1]
    torch.testing.assert_close(got[0, 0], weight @ v)


def test_merge_partials_op():
    case = merge_case(3)
    case = case | {name: case[name].nan_to_num() for name in ("o", "lse", "out")}
    torch.library.opcheck(torch.ops.csd.merge_partials.default, tuple(case.values()))
    args = *case.values(), torch.zeros(6)
    torch.library.opcheck(torch.ops.csd.merge_partials.default, args)


@pytest.mark.parametrize(
    "name,value,message",
    [
        ("out", torch.zeros(4, 5, 24), r"H a multiple of K, got \(2, 400, 24\) and \(4, 5, 24\)"),
        ("lse", torch.zeros(2, 40), r"lse must have shape \(2, 400\), got \(2, 40\)"),
        ("merge", torch.zeros(3, 4), r"merge must have shape \(4, 4\), got \(3, 4\)"),
        ("out", torch.zeros(4, 24, 6).mT, "out must be contiguous, got strides"),
    ],
)
def test_merge_partials_errors(name, value, message):
    with pytest.raises(ValueError, match=message):
        merge_partials(**(merge_case(3) | {name: value}))
