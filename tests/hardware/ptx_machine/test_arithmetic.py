"""One rounding, as the C library does it."""

import ctypes
import ctypes.util

import numpy as np
import pytest
import torch
from ptx import arithmetic

pytestmark = pytest.mark.stand_in


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(
    ("name", "dtype", "kind"),
    [
        ("fma", np.float64, ctypes.c_double),
        ("fmaf", np.float32, ctypes.c_float),
    ],
)
def test_a_product_and_a_sum_are_rounded_once(name, dtype, kind):
    fma = getattr(ctypes.CDLL(ctypes.util.find_library("m")), name)
    fma.restype, fma.argtypes = kind, [kind] * 3
    draw = np.random.default_rng(0)
    a, b = draw.standard_normal((2, 3000))
    # sums that nearly vanish, whose rounding the product's own would change
    c = -a * b * (1 + draw.standard_normal(3000) * 2.0 ** draw.integers(-60, 3, 3000))
    a, b, c = (x.astype(dtype) for x in (a, b, c))
    for x in (c, np.full_like(c, np.inf), np.full_like(c, np.nan), np.zeros_like(c)):
        got = getattr(arithmetic, "fma64" if dtype == np.float64 else "fma32")(a, b, x)
        np.testing.assert_array_equal(got, [fma(*row) for row in zip(a, b, x, strict=True)])


def test_bfloat16_is_rounded_as_torch_does():
    x = torch.randn(10_000) * 2.0 ** torch.randint(-130, 120, (10_000,))
    x = torch.cat([x, torch.tensor([0.0, -0.0, float("inf"), -float("inf")])])
    want = x.bfloat16()
    got = arithmetic.to_bf16(x.numpy())
    assert got.tolist() == want.view(torch.int16).numpy().view(np.uint16).tolist()
    np.testing.assert_array_equal(arithmetic.of_bf16(got), want.float().numpy())
    assert np.isnan(arithmetic.of_bf16(arithmetic.to_bf16(np.array([np.nan], np.float32)))).all()


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.uint64])
def test_high_halves_and_quotients(dtype):
    draw = np.random.default_rng(1)
    info = np.iinfo(dtype)
    a, b = draw.integers(info.min, info.max, (2, 500), dtype, endpoint=True)
    bits = info.bits
    assert [int(x) for x in arithmetic.high_half(a, b)] == [
        int(x) * int(y) >> bits for x, y in zip(a, b, strict=True)
    ]
    b = (b >> dtype(bits // 2)) + dtype(b[0] == 0)
    b[b == 0] = 3
    quotients = [
        abs(int(x)) // abs(int(y)) * (1 if (x < 0) == (y < 0) else -1)
        for x, y in zip(a, b, strict=True)
    ]
    assert arithmetic.divide(a, b).tolist() == quotients
