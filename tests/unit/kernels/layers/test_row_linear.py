"""Products in which a row's bits do not depend on how many rows there are."""

import os
from importlib import import_module

import pytest
import torch
from helpers.checks.precision import within_eager
from helpers.kernels.elementwise_cases import rotary_case
from helpers.targets import few, pairs, slow

from csd.kernels.layers.rms_norm import rms_norm_ref, rms_norm_triton
from csd.kernels.layers.rotary import rotary_ref, rotary_triton
from csd.kernels.layers.row_linear import (
    row_linear,
    row_linear_ref,
    row_linear_triton,
    row_parts_triton,
    splits_of,
)

pytestmark = pytest.mark.compiled

module = import_module("csd.kernels.layers.row_linear")

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
# on both sides of every tile
ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 255, 256)
# one tile and a part of one, one block and several, K even and not
SIZES = [(1, 16), (40, 150), (130, 64), (136, 256), (129, 330)]


@pytest.fixture
def split(monkeypatch):
    """Small matrices are split as large ones are."""
    monkeypatch.setattr(module, "LEAST_K", 64)


def operands(M, N, K, dtype, bias=False, whole=False):
    g = torch.Generator().manual_seed(M * N + K)

    def made(*size):
        if whole:
            return torch.randint(-4, 5, size, generator=g).to(dtype)
        return torch.randn(size, generator=g).to(dtype)

    return made(M, K), made(N, K), made(N) if bias else None


@pairs
@DTYPES
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("N,K", SIZES, ids=str)
@pytest.mark.parametrize("M", [1, 5, 33])
def test_equals_the_reference_where_sums_are_exact(M, N, K, bias, dtype, split, poison):
    x, weight, b = operands(M, N, K, dtype, bias, whole=True)
    got, want = row_linear_triton(x, weight, b), row_linear_ref(x, weight, b)
    # the interpreter's bfloat16 rounds towards zero what has more than 8 bits
    small = want.float().abs() <= 256
    assert small.any() and torch.equal(got[small], want[small])
    assert not got.isnan().any()
    exact = x.double() @ weight.double().T + (0 if b is None else b.double())
    within_eager(got, want, exact, K)


@DTYPES
@pytest.mark.parametrize("N,K", SIZES, ids=str)
def test_is_no_further_from_float64_than_pytorch(N, K, dtype, split):
    x, weight, bias = operands(9, N, K, dtype, True)
    eager = torch.nn.functional.linear(x, weight, bias)
    exact = x.double() @ weight.double().T + bias.double()
    within_eager(row_linear_ref(x, weight, bias), eager, exact, K)
    within_eager(row_linear_triton(x, weight, bias), eager, exact, K)


@few(2)
@DTYPES
@pytest.mark.parametrize(
    "N,K,rows",
    [(40, 64, ROWS), (129, 330, ROWS), pytest.param(40, 64, range(1, 257), marks=slow)],
    ids=["one split", "splits", "any rows"],
)
def test_a_row_has_the_same_bits_among_any_others(N, K, rows, dtype, split, ordered_products):
    x, weight, bias = operands(256, N, K, dtype, True)
    assert splits_of(129, 330, dtype)[0] > 1 == splits_of(40, 64, dtype)[0]
    whole = row_linear_triton(x, weight, bias)
    for M in ROWS if "CSD_PTX" in os.environ else rows:
        # the rows are at other places of other tiles
        assert torch.equal(row_linear_triton(x[-M:], weight, bias), whole[-M:]), f"{M} rows"


def test_it_needs_splits_that_do_not_follow_the_rows(monkeypatch, split, ordered_products):
    x, weight, _ = operands(64, 40, 330, torch.float32)
    whole = row_linear_triton(x, weight)
    monkeypatch.setattr(module, "PROGRAMS", 1)
    assert not torch.equal(row_linear_triton(x[:8], weight), whole[:8])


@pairs
@pytest.mark.parametrize("N", [1, 64, 4096, 28672])
@pytest.mark.parametrize("K", [1, 16, 576, 1024, 4096, 14336, 18944])
@DTYPES
def test_splits_cover_k_once(N, K, dtype):
    splits, each = splits_of(N, K, dtype)
    blocks = -(-K // (32 if dtype == torch.float32 else 64))
    assert 1 <= splits <= module.MAX_SPLITS
    assert (splits - 1) * each < blocks <= splits * each


@DTYPES
@pytest.mark.parametrize("M,N,K", [(1, 40, 330), (5, 129, 330), (40, 576, 150)], ids=str)
def test_a_norm_adds_the_splits_up_as_the_product_does(M, N, K, dtype, split, poison):
    x, weight, _ = operands(M, N, K, dtype)
    residual, scale, _ = operands(M, 1, N, dtype)
    parts, whole = row_parts_triton(x, weight), row_linear_triton(x, weight)
    assert parts.dim() == 3 and parts.dtype == torch.float32
    want = rms_norm_triton(whole, scale[0], 1e-5, residual)
    for got, y in zip(rms_norm_triton(parts, scale[0], 1e-5, residual), want, strict=True):
        assert got.dtype == dtype and torch.equal(got, y)
    eager = rms_norm_ref(parts, scale[0], 1e-5, residual)
    r = parts.double().sum(0) + residual.double()
    exact = scale[0].double() * r / (r.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    within_eager(want[0], eager[0], exact, N)
    assert eager[1].dtype == dtype


@DTYPES
@pytest.mark.parametrize("M,H,K,D,bias", [(1, 2, 1, 16, True), (5, 6, 2, 32, False)], ids=str)
def test_rotary_adds_the_splits_up_as_the_product_does(M, H, K, D, bias, dtype, split, poison):
    widths = (H * D, K * D, K * D)
    x, weight, b = operands(M, sum(widths), 330, dtype, bias)
    case = rotary_case(M, H, K, D, dtype)
    parts = row_parts_triton(x, weight, b)
    assert parts.dim() == 3

    def rotated(qkv, run=rotary_triton, **options):
        node_k, node_v = torch.full((2, M, K, D), torch.nan, dtype=dtype)
        q, k, v = (y.unflatten(-1, (-1, D)) for y in qkv.split(widths, dim=-1))
        where = case["position"], case["cos"], case["sin"], node_k, node_v
        return run(q, k, v, *where, **options), node_k, node_v

    whole = rotated(row_linear_triton(x, weight, b))
    for got, want in zip(rotated(parts, bias=b), whole, strict=True):
        assert got.dtype == dtype and torch.equal(got, want)
    eager = rotated(parts, rotary_ref, bias=b)
    exact = x.double() @ weight.double().T + (0 if b is None else b.double())
    wide = [y.double() for y in (case["cos"], case["sin"])]
    q, k, v = (y.unflatten(-1, (-1, D)) for y in exact.split(widths, dim=-1))
    node_k, node_v = torch.empty(2, M, K, D, dtype=torch.float64)
    exact_q = rotary_ref(q, k, v, case["position"], *wide, node_k, node_v)
    for got, ours, right in zip(whole, eager, (exact_q, node_k, node_v), strict=True):
        within_eager(got, ours, right, 330)


def test_a_product_that_is_not_split_has_no_parts():
    x, weight, bias = operands(3, 40, 64, torch.float16, True)
    assert torch.equal(row_parts_triton(x, weight, bias), row_linear_triton(x, weight, bias))


def test_rows_may_lie_apart(split):
    x, weight, _ = operands(5, 40, 150, torch.float32)
    wide = torch.full((5, 200), float("nan"))
    wide[:, :150] = x
    assert torch.equal(row_linear_triton(wide[:, :150], weight), row_linear_triton(x, weight))


def test_no_rows():
    x, weight, _ = operands(0, 40, 64, torch.float16)
    assert row_linear_triton(x, weight).shape == row_linear_ref(x, weight).shape == (0, 40)


def test_op():
    x, weight, bias = operands(3, 8, 16, torch.float32, True)
    assert torch.equal(row_linear(x, weight, bias), row_linear_ref(x, weight, bias))
    torch.library.opcheck(torch.ops.csd.row_linear.default, (x, weight, bias))
    torch.library.opcheck(torch.ops.csd.row_linear.default, (x, weight))


@pytest.mark.parametrize(
    "x,weight,bias,message",
    [
        ((3, 4), (5, 6), None, r"x must have shape \(\*, 6\), got \(3, 4\)"),
        ((3,), (5, 6), None, r"x and weight must be \[M, K\] and .* got \(3,\) and"),
        ((3, 6), (5, 6), (6,), r"bias must have shape \(5,\), got \(6,\)"),
    ],
)
def test_errors(x, weight, bias, message):
    with pytest.raises(ValueError, match=message):
        row_linear(torch.zeros(x), torch.zeros(weight), bias and torch.zeros(bias))


def test_other_dtypes_are_errors():
    double = torch.zeros(2, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"x must be float16, bfloat16 or float32, got torch"):
        row_linear(double, double)
    with pytest.raises(ValueError, match=r"weight must be torch\.float32, got torch\.float16"):
        row_linear(torch.zeros(2, 4), torch.zeros(2, 4).half())
