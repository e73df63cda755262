"""Products in blocks of rows that agree, on products that are known to disagree."""

import pytest
import torch

from csd.models.exact import exact
from csd.models.exact_products import CUBLAS_ROWS, SIZES, ExactProducts, RowBlocks, row_blocks
from csd.models.fused.fuse import fuse
from csd.models.fused.linear import linear

torch.manual_seed(0)
WEIGHT = torch.randn(24, 96)


def halves(x, weight):
    """Another order of summation than `whole`."""
    return x[:, :48] @ weight[:, :48].T + x[:, 48:] @ weight[:, 48:].T


def by_row(x, weight):
    return (x[:, None] * weight).cumsum(-1)[..., -1]


def other_kernel(least, most):
    """A library that takes another kernel below `least` and above `most` rows."""

    def product(x, weight, bias):
        if least <= x.shape[0] <= most:
            return by_row(x, weight)
        return torch.cat([halves(row[None], weight) for row in x])

    return product


@pytest.mark.parametrize("least,most", [(1, 256), (2, 256), (1, 32), (4, 128), (32, 32), (8, 64)])
def test_blocks_are_the_largest_that_agree(least, most):
    assert row_blocks(other_kernel(least, most), WEIGHT) == RowBlocks(least, most)


@pytest.mark.parametrize("least,most", [(1, 256), (2, 64), (4, 32), (32, 32)])
def test_a_row_has_the_same_bits_among_any_others(least, most):
    product = ExactProducts(other_kernel(least, most))
    x = torch.randn(300, 96, generator=torch.manual_seed(1))
    alone = product(x[7:8], WEIGHT)
    for rows in (1, 2, 3, 17, 31, 33, 65, 292):
        for at in {0, rows // 2, rows - 1}:
            first = 7 - at if at <= 7 else 0
            moved = x[first : first + rows].clone()
            moved[at] = x[7]
            assert torch.equal(product(moved, WEIGHT)[at], alone[0])


def test_blocks_are_refused_where_the_place_matters():
    def product(x, weight, bias):
        # the second half of a block is added up in another order
        half = x.shape[0] // 2
        return torch.cat([by_row(x[:half], weight), halves(x[half:], weight)])

    with pytest.raises(ValueError, match="exact must be False here"):
        row_blocks(product, WEIGHT)


def test_a_machine_on_which_nothing_agrees_is_refused():
    def product(x, weight, bias):
        return by_row(x, weight) + torch.arange(len(x))[:, None]

    with pytest.raises(
        ValueError, match=r"\(24, 96\) torch.float32 matrix depend on the number of rows"
    ):
        row_blocks(product, WEIGHT)


def test_where_every_number_of_rows_has_bits_of_its_own_one_is_kept():
    def product(x, weight, bias):
        return by_row(x, weight) + x.shape[0]

    assert row_blocks(product, WEIGHT) == RowBlocks(32, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(48, 40), (97, 33), (640, 576)], ids=str)
def test_this_machine_s_products(dtype, shape):
    weight = torch.randn(shape, generator=torch.manual_seed(2)).to(dtype)
    x = torch.randn(300, shape[1], generator=torch.manual_seed(3)).to(dtype)
    product = ExactProducts()
    whole = product(x, weight)
    for rows in (*SIZES, 7, 40, 200):
        assert torch.equal(product(x[-rows:], weight), whole[-rows:])


def test_cublas_rows_come_in_blocks_of_a_fixed_number():
    seen = []

    def product(x, weight, bias=None):
        seen.append(x.shape[0])
        return by_row(x, weight) + x.shape[0]

    products = ExactProducts(product, CUBLAS_ROWS)
    x = torch.randn(150, 96)
    whole = products(x, WEIGHT)
    assert set(seen) == {CUBLAS_ROWS} and whole.shape == (150, 24)
    for rows in (1, 63, 64, 65, 149):
        assert torch.equal(products(x[-rows:], WEIGHT), whole[-rows:])
    assert set(seen) == {CUBLAS_ROWS}


def test_a_fixed_number_of_rows_in_which_the_place_matters_is_refused():
    def product(x, weight, bias):
        return by_row(x, weight) + torch.arange(len(x))[:, None]

    with pytest.raises(ValueError, match="exact must be False here"):
        ExactProducts(product, 64)(WEIGHT[:3], WEIGHT)


def test_triton_s_product_agrees_for_every_number_of_rows(ordered_products):
    products = ExactProducts.of("triton")
    x = torch.randn(520, 96)
    whole = products(x, WEIGHT)
    assert set(products.blocks.values()) == {RowBlocks(1, 512)}
    for rows in (1, 40, 300, 513):
        assert torch.equal(products(x[-rows:], WEIGHT), whole[-rows:])
    torch.testing.assert_close(whole, linear(x, WEIGHT))


def test_kinds_of_products():
    x = torch.randn(3, 96)
    for kind in ("library", "cublas"):
        torch.testing.assert_close(ExactProducts.of(kind)(x, WEIGHT), linear(x, WEIGHT))
    with pytest.raises(ValueError, match="must be 'library', 'triton' or 'cublas', got 'rocblas'"):
        ExactProducts.of("rocblas")


def test_a_bias_is_added():
    product, bias = ExactProducts(), torch.randn(24)
    x = torch.randn(5, 96)
    torch.testing.assert_close(product(x, WEIGHT, bias), linear(x, WEIGHT, bias))


def test_a_decoder_keeps_its_weights():
    from helpers.models import checkpoints

    plain = fuse(checkpoints.build("llama"))
    made = exact(plain)
    assert made.layers is plain.layers and made.head is plain.head
    assert isinstance(made.linear, ExactProducts) and plain.linear is linear


def test_another_order_for_one_row_is_found_in_rounded_results():
    """On a CPU with AMX oneDNN adds 32 bfloat16 numbers of one row in an order of its own."""

    def product(x, weight, bias):
        order = range(32) if x.shape[0] > 1 else [*range(0, 32, 2), *range(1, 32, 2)]
        total = torch.zeros(x.shape[0], weight.shape[0])
        for k in order:
            total += x[:, k, None].float() * weight[:, k].float()
        return total.bfloat16()

    weight = torch.randn(128, 32, generator=torch.Generator().manual_seed(5)).bfloat16()
    assert row_blocks(product, weight).min_rows == 2
