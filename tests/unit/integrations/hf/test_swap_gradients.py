"""Operations that `csd.apply_kernels` swaps in: their backward, and their kernels alone."""

import pytest
import torch
from helpers.checks.precision import within_eager
from torch.autograd import gradcheck

from csd.kernels.attention import tree_attention
from csd.kernels.layers.rms_norm import rms_norm, rms_norm_ref
from csd.kernels.layers.rotary import rotary, rotate, rotate_ref, rotate_triton
from csd.kernels.layers.swiglu import silu_mul, silu_mul_ref, silu_mul_triton, swiglu, swiglu_ref

pytestmark = pytest.mark.compiled


def leaf(*shape, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=g, dtype=dtype).requires_grad_()


def test_gradcheck():
    cos, sin = leaf(3, 6).detach(), leaf(3, 6, seed=1).detach()
    assert gradcheck(rotate, (leaf(3, 4, 6), leaf(3, 2, 6), cos, sin))
    assert gradcheck(silu_mul, (leaf(2, 3, 5), leaf(2, 3, 5, seed=1)))
    assert gradcheck(swiglu, (leaf(2, 3, 10),))
    assert gradcheck(swiglu, (leaf(2, 3, 10), True))


def exact_norm(x, weight, eps, residual=None, *, plus_one=False):
    total = x if residual is None else x + residual
    return (weight + plus_one) * total / (total.pow(2).mean(-1, keepdim=True) + eps).sqrt(), total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(7,), (3, 33), (2, 3, 5, 8)], ids=str)
@pytest.mark.parametrize("plus_one", [False, True])
def test_norm_gradients_are_as_near_as_those_of_the_reference(plus_one, shape, dtype):
    # gradcheck cannot: the statistics are float32 in any dtype
    grad, grad_sum = (
        leaf(*shape, seed=5).detach().to(dtype),
        leaf(*shape, seed=6).detach().to(dtype),
    )
    for residual in (False, True):
        found = []
        for norm in (rms_norm, rms_norm_ref, exact_norm):
            wide = torch.float64 if norm is exact_norm else dtype
            leaves = [leaf(*shape), leaf(shape[-1], seed=1), leaf(*shape, seed=2)]
            leaves = [x.detach().to(dtype).to(wide).requires_grad_() for x in leaves]
            x, weight, r = leaves
            y, total = norm(x, weight, 1e-5, r if residual else None, plus_one=plus_one)
            outs = (y, total) if residual else (y,)
            torch.autograd.backward(outs, [g.to(wide) for g in (grad, grad_sum)[: len(outs)]])
            found.append([x.grad for x in leaves[: 2 + residual]])
        for x in zip(*found, strict=True):
            within_eager(*x, leaf(*shape).numel())


@pytest.mark.parametrize("M,H,K,D", [(1, 1, 1, 2), (3, 9, 3, 64), (2, 14, 2, 96)])
def test_rotate_triton(M, H, K, D, poison):
    with torch.no_grad():
        args = [leaf(M, n, D, dtype=torch.float32) for n in (H, K)]
        args += [leaf(M, D, seed=n, dtype=torch.float32) for n in (1, 2)]
        exact = rotate_ref(*(x.double() for x in args))
        for x in zip(rotate_triton(*args), rotate_ref(*args), exact, strict=True):
            within_eager(*x, 2)
        # queries inside the row of a fused product
        fused = torch.cat([args[0], args[1]], dim=1)
        q, k = fused.split((H, K), dim=1)
        for x in zip(rotate_triton(q, k, *args[2:]), rotate_ref(*args), exact, strict=True):
            within_eager(*x, 2)


def test_silu_mul_triton(poison):
    with torch.no_grad():
        gate, up = leaf(3, 1030, dtype=torch.float32), leaf(3, 1030, seed=1, dtype=torch.float32)
        want = swiglu_ref(torch.cat([gate, up], -1))
        exact = swiglu_ref(torch.cat([gate, up], -1).double())
        within_eager(silu_mul_triton(gate, up), want, exact, 1)
        assert torch.equal(silu_mul(gate, up), silu_mul_ref(gate, up))


def test_operators():
    ops = torch.ops.csd
    x = leaf(3, 8, dtype=torch.float32)
    torch.library.opcheck(ops.silu_mul.default, (x, x))
    torch.library.opcheck(ops.rms_norm.default, (x, leaf(8, dtype=torch.float32), 1e-5))
    q, table = leaf(3, 4, 8, dtype=torch.float32), x.detach()
    torch.library.opcheck(ops.rotate.default, (q, q, table, table))


def test_errors():
    x, wide = torch.zeros(3, 4, 8), torch.zeros(3, 8)
    node = torch.zeros(3, 4, 8)
    position = torch.zeros(3, dtype=torch.int32)
    for call, message in (
        (
            lambda: silu_mul(wide, wide[:2]),
            r"up must have shape \(3, 8\), got \(2, 8\)",
        ),
        (lambda: silu_mul(wide.T, wide.T), "gate must be contiguous, got strides"),
        (lambda: rotate(x, x[:, :3], wide, wide), "H a multiple of K"),
        (lambda: rotate(x, x, wide.double(), wide), "cos must be torch.float32, got torch.float64"),
        (lambda: rotate(x, x, wide, wide[:, :6]), r"sin must have shape \(3, 8\), got \(3, 6\)"),
        (lambda: rotate(x.mT.contiguous().mT, x, wide, wide), "rows of q must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    learned = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="rotary has no backward"):
        rotary(learned, x, x, position, wide, wide, node, node.clone())
    with pytest.raises(RuntimeError, match="no gradient for cos and sin"):
        rotate(x, x, wide.clone().requires_grad_(), wide)
    with pytest.raises(RuntimeError, match="tree_attention has no backward"):
        tree_attention(learned, x, x, *[None] * 3, 1.0)
