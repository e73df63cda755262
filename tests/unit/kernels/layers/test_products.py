"""csd's own products on a CPU against float64, and their bits among other rows."""

import pytest
import torch
from helpers.targets import few, pairs

pytest.importorskip("numba")

from csd.kernels.layers.cpu import unpacked
from csd.kernels.layers.cpu.linear import MAX_ROWS, by_columns, fits, product
from csd.kernels.layers.cpu.unpacked import ROWS as UNPACKED_ROWS
from csd.kernels.numba.isa import instructions
from csd.kernels.numba.tiles import COLUMNS, ROWS

NAN = float("nan")
BF16, F32 = torch.bfloat16, torch.float32
# dtypes with the instructions that this CPU has for them
KINDS = [(dtype, by) for dtype in (F32, BF16) for by in instructions(dtype)]
PLAIN = [(dtype, by, True) for dtype, by in KINDS]
every_layout = pytest.mark.parametrize(
    ("dtype", "by", "plain"), [(*kind, False) for kind in KINDS] + PLAIN, ids=str
)


@pytest.fixture(autouse=True)
def no_tiles(monkeypatch):
    """On a CPU with AMX bfloat16 is oneDNN's."""
    monkeypatch.setattr("csd.kernels.numba.isa.has_amx", lambda: False)


def laid_out(weight, by, plain):
    return weight if plain else by_columns(weight, by)


def case(rows, dtype, N=3 * COLUMNS, K=96, biased=True):
    generator = torch.manual_seed(rows)
    x, weight, bias = (torch.randn(*n, generator=generator) for n in ((rows, K), (N, K), (N,)))
    return x.to(dtype), weight.to(dtype), bias.to(dtype) if biased else None


@pairs
@every_layout
@pytest.mark.parametrize(
    "rows", [0, 1, 2, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS + 1, 33, MAX_ROWS, MAX_ROWS + 1]
)
@pytest.mark.parametrize("biased", [False, True])
def test_the_product_is_as_near_as_its_dtype_allows(dtype, by, plain, rows, biased):
    x, weight, bias = case(rows, dtype, biased=biased)
    got = product(x, laid_out(weight, by, plain), bias, by)
    want = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    if biased:
        want, size = want + bias.double(), size + bias.double().abs()
    # a rounding of each of K sums in float32, and one of the result
    limit = x.shape[1] * torch.finfo(torch.float32).eps / 2 * size
    if dtype == torch.bfloat16:
        limit = limit + torch.finfo(dtype).eps / 2 * (want.abs() + limit)
    assert got.dtype == dtype and got.shape == want.shape
    assert ((got.double() - want).abs() <= limit).all()


@pytest.mark.parametrize("K", [16, 48])
def test_a_sum_is_taken_in_the_order_of_its_products(K):
    """With one rounding each, as float64 has it where both factors have few bits."""
    x, weight, bias = case(5, torch.bfloat16, K=K)
    total = bias.float().expand(5, -1)
    for k in range(K):
        # the product has 16 bits, so float64 holds it, and the sum is rounded to float32
        total = (total.double() + x[:, k, None].double() * weight[:, k].double()).float()
    assert torch.equal(product(x, by_columns(weight, "fma"), bias, "fma"), total.bfloat16())
    wide = product(x.float(), by_columns(weight.float()), bias.float(), "fma")
    assert torch.equal(wide, total)


@pytest.mark.skipif("dot" not in instructions(BF16), reason="the CPU does not have it")
def test_of_a_pair_the_odd_product_is_added_first():
    """It is rounded then: attention's sums do not depend on where its pairs begin."""
    x, weight, bias = case(5, torch.bfloat16)
    total = bias.float().expand(5, -1)
    for k in range(0, x.shape[1], 2):
        for odd in (k + 1, k):
            added = x[:, odd, None].double() * weight[:, odd].double()
            total = (total.double() + added).float()
    assert torch.equal(product(x, by_columns(weight, "dot"), bias, "dot"), total.bfloat16())


@every_layout
def test_a_row_has_the_same_bits_among_any_others(dtype, by, plain):
    x, weight, bias = case(MAX_ROWS + 30, dtype)
    blocks = laid_out(weight, by, plain)
    alone = torch.cat([product(row[None], blocks, bias, by) for row in x])
    for rows in (2, 3, ROWS, ROWS + 1, 3 * ROWS - 1, MAX_ROWS, MAX_ROWS + 30):
        for first in (0, 7, MAX_ROWS + 30 - rows):
            some = slice(first, first + rows)
            assert torch.equal(product(x[some], blocks, bias, by), alone[some])


@few(2)
@every_layout
def test_threads_leave_the_bits_as_they_are(dtype, by, plain):
    # enough numbers for a second thread
    x, weight, bias = case(20, dtype, N=16 * COLUMNS, K=640)
    found, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(product(x, laid_out(weight, by, plain), bias, by))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@every_layout
def test_one_row_s_nan_and_infinity_stay_its_own(dtype, by, plain):
    x, weight, bias = case(ROWS + 9, dtype)
    want = product(x, laid_out(weight, by, plain), bias, by)
    x[2, 5], x[9, 0] = NAN, float("inf")
    got = product(x, laid_out(weight, by, plain), bias, by)
    others = [i for i in range(len(x)) if i not in (2, 9)]
    assert torch.equal(got[others], want[others])
    assert got[2].isnan().all() and not got[9].isfinite().any()
    assert torch.equal(got[9].sign(), weight[:, 0].sign())


@pytest.mark.parametrize("by", [by for _, by in KINDS[1:]])
def test_every_nan_of_bfloat16_stays_one(by):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    nan = bits.view(torch.bfloat16)
    nan = nan[nan.isnan()]
    x = torch.zeros(len(nan), 32, dtype=torch.bfloat16)
    x[:, 3] = nan
    assert product(x, by_columns(torch.ones(COLUMNS, 32).bfloat16(), by), isa=by).isnan().all()


def test_rounding_to_bfloat16_is_pytorch_s():
    """Ties to even, the largest numbers, and those that become infinite."""
    generator = torch.manual_seed(0)
    some = torch.randint(-(2**31), 2**31, (4000,), generator=generator, dtype=torch.int64)
    ties = (some & ~0xFFFF) | 0x8000
    edges = torch.tensor([0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x00000001, 1 - 2**31])
    bits = torch.cat([some, ties, edges]).to(torch.int32)
    value = bits.view(torch.float32)
    value = value[value.isfinite()]
    # three numbers of bfloat16, taken one from the other, hold every bit of a float32
    parts, rest = [], value
    for _ in range(3):
        high = (rest.view(torch.int32) & -0x10000).view(torch.float32)
        parts, rest = [*parts, high.bfloat16()], rest - high
    whole = sum(p.double() for p in parts) == value.double()
    x = torch.zeros(len(value), 16, dtype=torch.bfloat16)
    x[:, :3] = torch.stack(parts[::-1], 1)
    got = product(x, by_columns(torch.ones(COLUMNS, 16).bfloat16(), "fma"), isa="fma")[:, 0]
    assert whole.float().mean() > 0.9
    assert torch.equal(got[whole].view(torch.int16), value.bfloat16()[whole].view(torch.int16))


@pytest.mark.parametrize("plain", [False, True])
def test_rows_that_lie_apart_and_memory_that_is_not_the_row_s(plain):
    whole = torch.full((9, 200), NAN, dtype=torch.bfloat16)
    x, weight, _ = case(9, torch.bfloat16)
    whole[:, 40:136] = x
    weight = weight if plain else by_columns(weight)
    assert torch.equal(product(whole[:, 40:136], weight), product(x, weight))


@pairs
@pytest.mark.parametrize(("dtype", "by", "_"), PLAIN, ids=str)
@pytest.mark.parametrize("K", [32, 160])
@pytest.mark.parametrize("rows", range(1, UNPACKED_ROWS + 2))
def test_a_plain_weight_s_columns_are_all_multiplied(dtype, by, _, K, rows):
    """Whole numbers, so any order has the same sum; every number of columns side by side."""
    generator = torch.manual_seed(rows)
    x, weight = (torch.randint(-4, 5, (n, K), generator=generator) for n in (rows, 3 * COLUMNS))
    kept = weight.to(dtype)
    assert torch.equal(product(x.to(dtype), kept, isa=by), (x @ weight.T).to(dtype))
    assert torch.equal(kept, weight.to(dtype))


def test_what_the_loop_multiplies():
    even = torch.empty(2 * COLUMNS, 96)
    assert fits(even) and fits(even.bfloat16())
    assert not fits(even[:-1]) and not fits(even[:, :-1])
    assert not fits(even.double()) and not fits(even.half())
    # pairs are turned 16 at a time
    assert fits(even[:, :80], "fma")
    assert not fits(even[:, :80], "dot")


def test_which_plain_weights_the_loop_multiplies():
    even = torch.empty(2 * COLUMNS, 96)
    assert unpacked.fits(even) and unpacked.fits(even.bfloat16())
    assert not unpacked.fits(even[:-1]) and not unpacked.fits(even[:, :-1].contiguous())
    assert not unpacked.fits(even.double()) and not unpacked.fits(even.half())
    assert not unpacked.fits(even[:, :64]) and not unpacked.fits(even.T)
