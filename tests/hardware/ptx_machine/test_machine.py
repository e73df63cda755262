"""Faults that the machine finds: CSD_PTX=sm_90 python -m pytest tests/hardware/ptx_machine"""

import os

import pytest

if not os.environ.get("CSD_PTX"):
    pytest.skip("compiles kernels: CSD_PTX names the chip", allow_module_level=True)

import torch
import triton
import triton.language as tl
from ptx.launch import emulated
from ptx.machine import Kernel
from ptx.races import MemoryFault
from ptx.text import parse

pytestmark = pytest.mark.stand_in


@triton.jit
def _reverse(x_ptr, y_ptr, N: tl.constexpr, BARRIER: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(x_ptr + offs, offs)
    if BARRIER:
        tl.debug_barrier()
    tl.store(y_ptr + offs, tl.load(x_ptr + N - 1 - offs))


@triton.jit
def _next(x_ptr, y_ptr, n, ATOMIC: tl.constexpr):
    p = tl.program_id(0)
    if ATOMIC:
        tl.atomic_add(x_ptr + p % 2, 1)
    else:
        tl.store(x_ptr + p, p)
        tl.store(y_ptr + p, tl.load(x_ptr + (p + 1) % n))


@triton.jit
def _first(x_ptr, y_ptr, ATOMIC: tl.constexpr):
    p = tl.program_id(0)
    tl.store(y_ptr + p, tl.load(x_ptr))
    if p == 1:
        if ATOMIC:
            tl.atomic_add(x_ptr, 1)
        else:
            tl.store(x_ptr, 7)


@triton.jit
def _fill(x_ptr, n, N: tl.constexpr):
    offs = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(x_ptr + offs, 1, mask=offs < n)


@triton.jit
def _sum(x_ptr, y_ptr, N: tl.constexpr):
    tl.store(y_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, N))))


@triton.jit
def _product(a_ptr, b_ptr, c_ptr, N: tl.constexpr, K: tl.constexpr, ROUNDS: tl.constexpr):
    row, column = tl.arange(0, 64)[:, None], tl.arange(0, N)[None, :]
    k = tl.arange(0, K)
    c = tl.zeros([64, N], tl.float32)
    for i in range(ROUNDS):
        a = tl.load(a_ptr + row * K * ROUNDS + i * K + k[None, :])
        b = tl.load(b_ptr + (i * K + k)[:, None] * N + column)
        c = tl.dot(a, b, c)
    tl.store(c_ptr + row * N + column, c)


@pytest.fixture
def x():
    return torch.zeros(256, dtype=torch.int32)


def test_a_missing_barrier_is_found(x):
    y = torch.zeros_like(x)
    _reverse[(1,)](x, y, 256, True)
    assert y.tolist() == list(range(255, -1, -1))
    with pytest.raises(MemoryFault, match=r"warp \d (reads|writes) what .*test_machine.py"):
        _reverse[(1,)](x.zero_(), y, 256, False)


def test_programs_that_depend_on_one_another_are_found(x):
    with pytest.raises(MemoryFault, match=r"program \d, warp \d (reads|writes) what"):
        _next[(4,)](x.fill_(9), torch.zeros_like(x), 4, False)
    _next[(7,)](x.zero_(), x, 4, True)
    assert x[:3].tolist() == [4, 3, 0]


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("atomic", [False, True])
def test_memory_read_by_several_programs_must_not_change(x, atomic, seed):
    found = pytest.raises(MemoryFault, match=r"warp 0 (reads|writes|changes)")
    # in step, all of them read in one instruction
    with emulated("sm_90", seed), found:
        _first[(2,)](x, torch.zeros_like(x), atomic)


def test_addresses_outside_of_a_tensor_are_found(x):
    _fill[(3,)](x, 250, 128)
    assert x.tolist() == [1] * 250 + [0] * 6
    with pytest.raises(MemoryFault, match="is in no tensor of"):
        _fill[(3,)](x, 400, 128)


def test_words_stored_together_must_be_aligned(x):
    # compiled for addresses that are multiples of 16, and launched at one that is not
    kernel = _fill[(1,)](x, 256, 256)
    begin, end = x.data_ptr(), x.data_ptr() + 1024
    with pytest.raises(MemoryFault, match="not a multiple of 8 bytes"):
        Kernel(parse(kernel.asm["ptx"])).launch(
            (1, 1, 1), [begin + 4, 128, 0, 0], [(begin, end)], kernel.metadata.shared
        )


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_warps_in_any_order(target, seed):
    x, y = torch.arange(1000, 2024, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with emulated(target, seed):
        _sum[(1,)](x, y, 1024)
    assert y.item() == x.sum()


# products of an MMA instruction, of wgmma where there is one, one and two patterns wide
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("N", "K"), [(16, 32), (64, 64), (128, 128)])
def test_products_of_matrices(target, dtype, N, K):
    # whole numbers, whose sums are exact in any order
    a, b = (torch.randint(-8, 9, shape).to(dtype) for shape in ((64, 4 * K), (4 * K, N)))
    c = torch.full((64, N), float("nan"))
    with emulated(target):
        compiled = _product[(1,)](a, b, c, N, K, 4)
    assert torch.equal(c, a.float() @ b.float())
    assert ("wgmma" in compiled.asm["ptx"]) == (target == "sm_90")
    # loads of the next round run beside the products
    assert "cp.async.wait_group" in compiled.asm["ptx"]
