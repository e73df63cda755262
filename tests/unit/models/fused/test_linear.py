"""`csd.models.fused.linear` against the product in float64."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from csd.models.fused.linear import linear


def assert_rounded(got, x, weight, bias=None):
    """Within n roundings of a sum of n products, in whatever order they are added."""
    x, weight = x.double(), weight.double()
    want, size = x @ weight.T, x.abs() @ weight.T.abs()
    if bias is not None:
        want, size = want + bias, size + bias.abs()
    limit = (x.shape[1] + 1) * torch.finfo(torch.float32).eps / 2 * size
    assert got.dtype == torch.float32 and got.shape == want.shape
    assert ((got.double() - want).abs() <= limit).all()


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.manual_seed(0)).to(dtype)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 8, 17, 64])
@pytest.mark.parametrize("biased", [False, True])
def test_the_product_is_as_near_as_float32_allows(rows, biased):
    # rows of a fused matrix, as the queries' part of one is
    x, weight = random(rows, 48), random(40, 48)[3:36]
    bias = random(33) if biased else None
    assert_rounded(linear(x, weight, bias), x, weight, bias)


def test_rows_may_lie_apart():
    x, weight = random(6, 32)[::2, ::2], random(5, 16)
    assert_rounded(linear(x, weight), x, weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_pytorch_s_own_product(dtype):
    x, weight = random(3, 16, dtype=dtype), random(8, 16, dtype=dtype)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))


def test_a_build_without_onednn_uses_pytorch_s_own_product(monkeypatch):
    monkeypatch.setattr("csd.models.fused.linear.ONEDNN", False)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", None)
    x, weight = random(3, 16), random(8, 16)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))


@pytest.mark.filterwarnings("ignore:TF32")
def test_without_onednn_it_is_pytorch_s_own_product():
    x, weight = random(3, 16), random(8, 16)
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))


def test_shapes_are_known_without_the_numbers():
    with FakeTensorMode():
        assert linear(torch.empty(3, 16), torch.empty(8, 16), torch.empty(8)).shape == (3, 8)
