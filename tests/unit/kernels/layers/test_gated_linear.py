"""SwiGLU within a product: the bits of the two one after the other."""

from importlib import import_module

import pytest
import torch
from helpers.checks.precision import within_eager

from csd.kernels.layers.gated_linear import gated_linear, gated_linear_ref, gated_linear_triton
from csd.kernels.layers.row_linear import row_linear_triton
from csd.kernels.layers.swiglu import swiglu_triton

pytestmark = pytest.mark.compiled

module = import_module("csd.kernels.layers.row_linear")

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
# [F, K]: less than a tile, one and a part of one; K even and not
SIZES = [(1, 16), (20, 150), (64, 64), (70, 128)]


def operands(M, F, K, dtype):
    g = torch.Generator().manual_seed(M * F + K)
    x, weight = torch.randn(M, K, generator=g), torch.randn(2 * F, K, generator=g)
    return x.to(dtype), (weight / K**0.5).to(dtype)


@DTYPES
@pytest.mark.parametrize("F,K", SIZES, ids=str)
@pytest.mark.parametrize("M", [1, 17, 40])
def test_has_the_bits_of_a_product_and_its_activation(M, F, K, dtype, poison, ordered_products):
    x, weight = operands(M, F, K, dtype)
    got = gated_linear_triton(x, weight)
    assert torch.equal(got, swiglu_triton(row_linear_triton(x, weight)))
    assert got.abs().max() > 0


@DTYPES
def test_is_no_further_from_float64_than_the_reference(dtype):
    x, weight = operands(9, 70, 128, dtype)
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    exact = torch.nn.functional.silu(gate) * up
    within_eager(gated_linear_triton(x, weight), gated_linear_ref(x, weight), exact, 128)


@DTYPES
def test_a_row_has_the_same_bits_among_any_others(dtype, ordered_products):
    x, weight = operands(130, 40, 64, dtype)
    whole = gated_linear_triton(x, weight)
    for M in (1, 16, 17, 33, 64, 65, 129):
        assert torch.equal(gated_linear_triton(x[-M:], weight), whole[-M:]), f"{M} rows"


def test_where_k_is_split_the_sums_are_added_first(monkeypatch, poison):
    monkeypatch.setattr(module, "LEAST_K", 64)
    x, weight = operands(5, 40, 330, torch.float16)
    assert module.splits_of(80, 330, torch.float16)[0] > 1
    want = swiglu_triton(row_linear_triton(x, weight))
    assert torch.equal(gated_linear_triton(x, weight), want)


def test_rows_may_lie_apart_or_be_none():
    x, weight = operands(5, 20, 64, torch.float32)
    wide = torch.full((5, 100), float("nan"))
    wide[:, :64] = x
    assert torch.equal(gated_linear_triton(wide[:, :64], weight), gated_linear_triton(x, weight))
    assert gated_linear_triton(x[:0], weight).shape == gated_linear_ref(x[:0], weight).shape


def test_op():
    x, weight = operands(3, 8, 16, torch.float32)
    assert torch.equal(gated_linear(x, weight), gated_linear_ref(x, weight))
    torch.library.opcheck(torch.ops.csd.gated_linear.default, (x, weight))


def test_errors():
    with pytest.raises(ValueError, match=r"weight must be \[2F, K\], got \(5, 6\)"):
        gated_linear(torch.zeros(3, 6), torch.zeros(5, 6))
    with pytest.raises(ValueError, match="gated_linear has no bias"):
        gated_linear_triton(torch.zeros(3, 6), torch.zeros(4, 6), torch.zeros(4))
    with pytest.raises(ValueError, match=r"x must be float16, bfloat16 or float32, got torch"):
        gated_linear(torch.zeros(3, 6).double(), torch.zeros(4, 6).double())
