"""Triton's interpreter, as `tools/interpreter.py` has it, refuses what the compiler refuses."""

import os

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif("CSD_PTX" in os.environ, reason="nothing is interpreted")


@triton.jit
def block_kernel(out_ptr, N: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.zeros([N], tl.int32), 0))


@triton.jit
def sum_kernel(out_ptr, N: tl.constexpr, M: tl.constexpr):
    column, row = tl.arange(0, N)[:, None], tl.arange(0, M)[None, :]
    both = column + row
    wrong = both + tl.zeros([2 * M], tl.int32) if N > M else both
    tl.store(out_ptr + column * M + row, wrong)


@triton.jit
def wide_kernel(out_ptr, small, large):
    tl.store(out_ptr, small * 3 + large)
    tl.store(out_ptr + 1, small.to(tl.int8) + large)


@triton.jit
def loop_kernel(out_ptr, bound_ptr, N: tl.constexpr):
    for i in range(0, tl.load(bound_ptr + tl.arange(0, N)) if N > 1 else tl.load(bound_ptr)):
        tl.store(out_ptr + i, i + 1)


def test_sizes_of_blocks_are_powers_of_two():
    out = torch.ones(1, dtype=torch.int32)
    block_kernel[(1,)](out, 4)
    assert out.item() == 0
    for _ in range(2):
        with pytest.raises(Exception, match="Shape element 0 must be a power of 2"):
            block_kernel[(1,)](out, 3)


def test_only_shapes_that_fit_are_broadcast():
    out = torch.empty(2, 4, dtype=torch.int32)
    sum_kernel[(1,)](out, 2, 4)
    assert torch.equal(out, torch.arange(2)[:, None] + torch.arange(4).int())
    with pytest.raises(Exception, match="incompatible dimensions at index 1: 2 and 4"):
        sum_kernel[(1,)](out, 4, 2)


def test_numbers_have_the_wider_type_and_wrap_around_in_it():
    out = torch.empty(2, dtype=torch.int64)
    wide_kernel[(1,)](out, 1 << 30, 1 << 40)
    # int32 to begin with
    assert out.tolist() == [(1 << 40) + 3 * (1 << 30) - (1 << 32), 1 << 40]


def test_a_loop_ends_at_one_number():
    out, bound = torch.zeros(4, dtype=torch.int32), torch.tensor([3, 3])
    loop_kernel[(1,)](out, bound, 1)
    assert out.tolist() == [1, 2, 3, 0]
    with pytest.raises(Exception, match="size 1"):
        loop_kernel[(1,)](out, bound, 2)
