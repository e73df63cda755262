"""Verification with numba's passes over the logits: what `verify_ref` decides."""

import math

import pytest
import torch
from helpers.checks.equal_fields import assert_equal_fields
from helpers.kernels.tree_cases import random_logits, trees

from csd.kernels.verify import verify_ref
from csd.kernels.verify.cpu import heads as loops
from csd.kernels.verify.cpu.path import PASSES
from csd.kernels.verify.reference import verify_on_path
from csd.kernels.verify.reference_rows import heads_ref, log_sum_ref

FILTERS = {
    "none": {},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05},
    "typical": {"typical_p": 0.7},
    "typical of top-p": {"top_p": 0.9, "typical_p": 0.7},
    "penalty": {"repetition_penalty": 1.3},
    "greedy": {"temperature": 0.0},
    "end tokens later": {"min_new": 30},
}
LOW = [torch.bfloat16, torch.float16, torch.float32]
DTYPES = pytest.mark.parametrize("dtype", [*LOW, torch.float64], ids=str)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS.keys())
def test_what_the_reference_decides(options, dtype):
    pool, slots = trees(3, count=4, rows=16, live=True)
    for name, value in options.items():
        getattr(slots, name)[::2] = value
    logits = random_logits(pool.rows, 97).to(dtype)
    want, exact = verify_ref(logits, pool, slots), verify_ref(logits.double(), pool, slots)
    got = verify_ref(logits, pool, slots, PASSES)
    assert_equal_fields(got, want, exact, 97)
    on_path = verify_on_path(logits, pool, slots, PASSES)
    assert torch.equal(on_path.accept_row, want.accept_row)


def many(rows, vocab, dtype):
    """Logits of flat and sharp rows, and what a pass takes beside them."""
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=g) * torch.logspace(-1, 1.3, rows)[:, None]
    _, slots = trees(0, count=1, rows=1, live=True)
    slots.temperature[:] = 0.7
    temperature = torch.full((rows,), 0.7, dtype=torch.promote_types(dtype, torch.float32))
    slot, greedy = torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.bool)
    return logits.to(dtype), temperature, slots, slot, greedy


@DTYPES
@pytest.mark.parametrize("vocab", [1, 2, 255, 256, 257, 4099])
def test_heads_are_the_references(vocab, dtype):
    """In flat rows of the longest more tokens than a first look has room for."""
    case = many(7, vocab, dtype)
    got, want = loops.heads(*case), heads_ref(*case)
    exact = heads_ref(case[0].double(), case[1].double(), *case[2:])
    assert torch.equal(got.token, want.token)
    assert torch.equal(got.score, want.score)
    error = (want.rest_mass.double() - exact.rest_mass).abs().max()
    eps = torch.finfo(got.rest_mass.dtype).eps * math.sqrt(vocab)
    limit = 2 * error + eps * exact.rest_mass.max()
    assert ((got.rest_mass.double() - exact.rest_mass).abs() <= limit).all()


@DTYPES
def test_log_sums(dtype):
    x = many(7, 4099, dtype)[0]
    got, want, exact = loops.log_sum(x), log_sum_ref(x), log_sum_ref(x.double())
    eps = torch.finfo(got.dtype).eps
    error = (want.double() - exact).abs().max()
    assert ((got.double() - exact).abs() <= 2 * error + eps * exact.abs().max()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_has_the_same_bits_among_any_others(dtype):
    x, temperature, slots, slot, greedy = many(27, 1543, dtype)
    whole, sums = loops.heads(x, temperature, slots, slot, greedy), loops.log_sum(x)
    for n in (1, 2, 5):
        few = loops.heads(x[3 : 3 + n], temperature[:n], slots, slot[:n], greedy[:n])
        assert torch.equal(few.rest_mass, whole.rest_mass[3 : 3 + n])
        assert torch.equal(loops.log_sum(x[3 : 3 + n]), sums[3 : 3 + n])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("nan")])
def test_bad_logits_are_seen(value):
    pool, slots = trees(3, count=4, rows=16, live=True)
    logits = random_logits(pool.rows, 97)
    row = int(pool.slot_start[1])
    logits[row, 40] = value
    want = verify_ref(logits, pool, slots)
    assert want.bad[1]
    assert torch.equal(verify_ref(logits, pool, slots, PASSES).bad, want.bad)
