"""Attention of packed samples and its gradients: layout, reference, products of blocks, kernels."""

import pytest
import torch
from helpers.checks.precision import within_eager
from helpers.targets import few, pairs
from packed_cases import PROPERTIES, SHAPES, packed_case, parent_rows, plain_pass, samples
from torch.autograd import gradcheck

from csd.kernels.attention.packed import (
    PackedLayout,
    pack_rows,
    packed_attention,
    packed_attention_backward,
    packed_attention_backward_ref,
    packed_attention_ref,
    packed_lse,
)
from csd.kernels.attention.packed.blocks import packed_attention_blocks, packed_backward_blocks
from csd.kernels.attention.packed.layout import visible_rows
from csd.kernels.attention.packed.triton.backward import packed_attention_backward_triton
from csd.kernels.attention.packed.triton.forward import packed_attention_triton, plan_packed

REFERENCE = packed_attention_ref, packed_attention_backward_ref
BLOCKS = packed_attention_blocks, packed_backward_blocks
KERNELS = packed_attention_triton, packed_attention_backward_triton
# every property with all kinds of rows, and every shape with all properties
CALLS = [("prompts", named) for named in PROPERTIES]
CALLS += [(name, "all") for name in SHAPES if name != "prompts"]
# with a window of one key the gradients of queries and keys are 0, and no rounding error is
ROUNDED = [call for call in CALLS if call[1] != "window-1"]


def results(case, of, lse=True):
    """out, lse, dq, dk, dv and dsinks of an implementation."""
    attend, backward = of
    rest = *case.layout, case.scale, *case.properties.values()
    out, found = attend(case.q, case.k, case.v, *rest)
    grads = backward(case.grad, case.q, case.k, case.v, out, found if lse else None, *rest)
    return [out, found, *grads]


def near(case, got):
    """Each result is as near to float64's as that of PyTorch's autograd in the operands' dtype."""
    assert got[1].dtype == torch.promote_types(case.q.dtype, torch.float32)
    each = case.q.shape[1] // case.k.shape[1]
    length = case.q.shape[0] * each
    for x, eager, want in zip(got, plain_pass(case, case.q.dtype), case.want, strict=True):
        if want.numel():
            within_eager(x.to(eager.dtype), eager, want.double(), length)


@pytest.mark.parametrize("name", SHAPES)
def test_a_sample_is_a_path_of_rows(name):
    prompts, completions = samples(name)
    packed = pack_rows(prompts, completions)
    parents = dict(parent_rows(prompts, packed))
    # each row once, after the row before it
    assert sorted(parents) == list(range(len(packed.token)))
    assert all(before is None or before < row for row, before in parents.items())
    prefixes = set()
    for g, (prompt, of_prompt) in enumerate(zip(prompts, completions, strict=True)):
        for tokens, rows in zip(of_prompt, packed.rows[g], strict=True):
            assert packed.token[rows].tolist() == [prompt[-1], *tokens]
            assert packed.layout.position[rows].tolist() == [
                len(prompt) - 1 + i for i in range(len(rows))
            ]
            prefixes |= {(g, tuple(tokens[:i])) for i in range(1, len(tokens) + 1)}
    assert len(packed.token) == sum(map(len, prompts)) + len(prefixes)


@pytest.mark.parametrize("name,named", CALLS)
def test_rows_see_the_tokens_before_them(name, named):
    case = packed_case(name, named)
    window, chunk = (case.properties[x] for x in ("window", "chunk"))
    assert torch.equal(visible_rows(*case.layout, window, chunk), case.seen)


@pytest.mark.parametrize("of", [REFERENCE, BLOCKS], ids=["reference", "blocks"])
@pytest.mark.parametrize("name,named", CALLS)
def test_float64_equals_autograd(name, named, of):
    case = packed_case(name, named, value_dim=12)
    for got, want in zip(results(case, of), case.want, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name,named", ROUNDED)
def test_blocks_are_as_near_as_autograd(name, named, dtype):
    case = packed_case(name, named, dtype=dtype)
    near(case, results(case, BLOCKS))


@pytest.mark.parametrize("named", PROPERTIES)
def test_finite_differences(named):
    case = packed_case("samples", named, heads=(2, 1), D=2)
    properties = dict(case.properties)
    sinks = properties.pop("sinks")
    leaves = [case.q, case.k, case.v, *([] if sinks is None else [sinks])]

    def attend(q, k, v, sinks=None):
        return packed_attention(q, k, v, case.layout, case.scale, **properties, sinks=sinks)[0]

    assert gradcheck(attend, [x.requires_grad_() for x in leaves], fast_mode=True)


@pytest.mark.compiled
@few(4)
@pytest.mark.parametrize("name,named", ROUNDED)
def test_kernels(name, named, poison):
    case = packed_case(name, named, dtype=torch.float32)
    near(case, results(case, KERNELS))


@pytest.mark.compiled
@few(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "heads,D,size", [((7, 1), 128, 128), ((2, 2), 64, 96), ((3, 1), 20, 8)], ids=str
)
def test_kernels_in_sixteen_bits(heads, D, size, dtype, poison):
    case = packed_case("prompts", "all", heads, D, value_dim=size, dtype=dtype)
    near(case, results(case, KERNELS))


@pytest.mark.parametrize("of", [REFERENCE, BLOCKS, KERNELS], ids=["reference", "blocks", "kernels"])
def test_two_runs_have_equal_bits_and_one_without_an_lse(of):
    """It is computed again if there is none."""
    case = packed_case("samples", "all", dtype=torch.float32)
    want = results(case, of)
    for again in (results(case, of), results(case, of, lse=False)):
        assert all(map(torch.equal, again, want))


def test_the_lse_alone():
    case = packed_case("samples", "all")
    args = case.q, case.k, case.layout, case.scale
    torch.testing.assert_close(packed_lse(*args, **case.properties), case.want[1])


def test_a_backward_of_another_forward():
    """It reads out only by its products with the gradient, and takes any lse."""
    case = packed_case("prompts", "all", dtype=torch.float32)
    out, lse, *want = case.want
    with torch.no_grad():
        got = packed_attention_backward(
            case.grad,
            case.q,
            case.k,
            case.v,
            out.float(),
            lse.float(),
            case.layout,
            case.scale,
            **case.properties,
        )
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y.float(), rtol=1e-4, atol=1e-5)


@pairs
@pytest.mark.parametrize("rows,keys", [(1, 1), (5, 3), (3, 8), (64, 64)])
@pytest.mark.parametrize("named", ["none", "window", "chunk", "all"])
@pytest.mark.parametrize("name", SHAPES)
def test_plan_has_every_pair_that_is_seen(name, named, rows, keys):
    case = packed_case(name, named)
    work = plan_packed(*case.layout, rows, keys, *(case.properties[x] for x in ("window", "chunk")))
    pairs = {(int(i) // rows, int(j) // keys) for i, j in case.seen.nonzero()}
    T, B = work.visits.shape
    visits = [work.visits[t, : work.visit_count[t]].tolist() for t in range(T)]
    readers = [work.readers[b, : work.reader_count[b]].tolist() for b in range(B)]
    assert all(x == sorted(set(x)) for x in visits + readers)
    visited = {(t, b) for t, of in enumerate(visits) for b in of}
    assert visited == {(t, b) for b, of in enumerate(readers) for t in of} >= pairs
    if named == "none":
        assert visited == pairs


def test_operators():
    case = packed_case("samples", "all", dtype=torch.float32)
    leaves = [x.requires_grad_() for x in (case.q, case.k, case.v)]
    rest = *case.layout, case.scale, *case.properties.values()
    torch.library.opcheck(torch.ops.csd.packed_attention.default, (*leaves, *rest))
    out, lse = (x.detach() for x in packed_attention_ref(*leaves, *rest))
    args = case.grad, *(x.detach() for x in leaves), out, lse, *rest
    torch.library.opcheck(torch.ops.csd.packed_attention_backward.default, args)


@pytest.mark.parametrize("kind", ["cpu"])
def test_autocast_does_not_round_products(kind):
    case = packed_case("samples", dtype=torch.float32)
    want = results(case, BLOCKS)
    with torch.autocast(kind, dtype=torch.bfloat16):
        for got, x in zip(results(case, BLOCKS), want, strict=True):
            assert torch.equal(got, x)


def test_errors():
    x, layout = torch.zeros(3, 2, 4), PackedLayout(*torch.full((2, 3), 3, dtype=torch.int32))
    wide = torch.zeros(3, 2)
    for call, message in (
        (lambda: packed_attention(x, x[:, :0], x, layout, 1.0), "H a multiple of K, got"),
        (lambda: packed_attention(x, x.double(), x, layout, 1.0), "k must be torch.float32, got"),
        (lambda: packed_attention(x, x, x[:2], layout, 1.0), r"v must have shape \(3, 2, 4\), got"),
        (lambda: packed_attention_triton(x, x, x, *layout, 0.0), "scale must be positive, got 0.0"),
        (lambda: packed_attention(x, x, x, layout, 1.0, window=0), "window must be"),
        (
            lambda: packed_attention(x, x, x, layout._replace(end=layout.end[:2]), 1.0),
            r"layout.end must have shape \(3,\), got \(2,\)",
        ),
        (
            lambda: packed_attention(x, x, x, layout._replace(end=layout.end.long()), 1.0),
            "layout.end must be torch.int32, got torch.int64",
        ),
        (
            lambda: packed_attention_backward(x[:2], x, x, x, x, wide, layout, 1.0),
            r"grad must have shape \(3, 2, 4\), got \(2, 2, 4\)",
        ),
        (
            lambda: packed_attention_backward(x, x, x, x, x, wide.double(), layout, 1.0),
            "lse must be torch.float32, got torch.float64",
        ),
        (lambda: pack_rows([[1]], []), "completions must be one list per prompt, got 0 for 1"),
        (lambda: pack_rows([[1], []], [[], []]), "at least one token each, got none in prompt 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
