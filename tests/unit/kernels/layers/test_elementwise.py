"""Norm, rotary embedding and SwiGLU, interpreted and as a CPU's loops: no further from float64 than
eager is."""

import pytest
import torch
import torch.nn.functional as F
from helpers.kernels.elementwise_cases import normal, rotary_case
from helpers.targets import pairs

from csd.kernels.layers.cpu import elementwise as loops
from csd.kernels.layers.rms_norm import rms_norm, rms_norm_ref, rms_norm_triton
from csd.kernels.layers.rotary import rotary, rotary_ref, rotary_triton
from csd.kernels.layers.swiglu import swiglu, swiglu_ref, swiglu_triton

pytestmark = pytest.mark.compiled

DTYPES = (torch.float16, torch.float32, torch.float64)


def each(triton, loop):
    """Triton's kernel in the interpreter, and the CPU's loop in the dtype that both read."""
    return pytest.mark.parametrize(
        ("run", "dtype"),
        [*((triton, dtype) for dtype in DTYPES), (loop, torch.float32)],
        ids=[*(f"triton-{dtype}" for dtype in DTYPES), "loop"],
    )


def within_eager(got, eager, exact):
    """Largest error against float64 no worse than eager's but for one rounding."""
    assert got.dtype == eager.dtype and got.shape == exact.shape
    # the statistics of a norm are float32 in any dtype
    eps = max(torch.finfo(got.dtype).eps, torch.finfo(torch.float32).eps)
    slack = 2 * eps * exact.abs().max()
    error = (got.double() - exact).abs().max()
    limit = (eager.double() - exact).abs().max() + slack
    assert error <= limit, f"error {error:.2e}, limit {limit:.2e}"


def exact_norm(x, weight, eps, residual=None, plus_one=False):
    # the sum is rounded to the dtype, as it is what the next layers read
    r = (x if residual is None else x + residual).double()
    return (weight.double() + plus_one) * r / (r.pow(2).mean(-1, keepdim=True) + eps).sqrt(), r


@pairs
@pytest.mark.parametrize("shape", [(1, 1), (3, 576), (5, 63), (2, 3, 1000), (1, 2050)], ids=str)
@pytest.mark.parametrize("has_residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("plus_one", [False, True], ids=["weight", "plus one"])
@each(rms_norm_triton, loops.rms_norm)
def test_rms_norm(run, plus_one, shape, has_residual, dtype, poison):
    x, weight = 3 * normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype)
    residual = normal(*shape, dtype=dtype, seed=1) if has_residual else None
    exact, total = exact_norm(x, weight, 1e-5, residual, plus_one)
    eager, r = rms_norm_ref(x, weight, 1e-5, residual, plus_one=plus_one)
    y, r_run = run(x, weight, 1e-5, residual, plus_one=plus_one)
    within_eager(y, eager, exact)
    assert torch.equal(r, r_run) and torch.equal(r.double(), total)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("M,V,width", [(1, 1, 8), (5, 30, 576), (9, 4, 63)], ids=str)
def test_rms_norm_of_rows_of_a_table(M, V, width, dtype, poison):
    table, weight = normal(V, width, dtype=dtype), normal(width, dtype=dtype)
    rows = torch.randint(-1, V, (M,), generator=torch.Generator().manual_seed(M)).int()
    taken = table[rows.clamp(min=0).long()]
    of_dtype = (loops.rms_norm,) if dtype in loops.LOW else ()
    for run in (rms_norm_triton, *of_dtype, rms_norm, rms_norm_ref):
        y, r = run(table, weight, 1e-5, rows=rows)
        assert torch.equal(r, taken)
        assert torch.equal(y, run(taken, weight, 1e-5)[0])


def test_rms_norm_of_rows_takes_no_residual():
    x, weight, rows = normal(3, 8), normal(8), torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"rows need x \[V, F\] and no residual"):
        rms_norm(x, weight, 1e-5, x, rows)
    with pytest.raises(ValueError, match=r"rows must be torch\.int32, got torch\.int64"):
        rms_norm(x, weight, 1e-5, rows=rows.long())


def test_rms_norm_of_heads_in_a_wider_row():
    qkv = normal(5, 300)
    heads = qkv[:, 40:232].view(5, 3, 64)
    want = rms_norm_ref(heads.contiguous(), torch.ones(64), 1e-6)[0]
    torch.testing.assert_close(rms_norm_triton(heads, torch.ones(64), 1e-6)[0], want)


def test_rms_norm_of_heads_more_than_2_to_the_31_apart():
    # only what is read of this memory is ever there
    memory = torch.empty((1 << 31) + 8, dtype=torch.float16)
    x = memory.as_strided((1, 3, 8), (8, 1 << 30, 1))
    x.copy_(normal(1, 3, 8, dtype=torch.float16))
    want = rms_norm_ref(x, torch.ones(8).half(), 1e-6)[0]
    torch.testing.assert_close(rms_norm_triton(x, torch.ones(8).half(), 1e-6)[0], want)


@pytest.mark.parametrize("layout", ["transposed", "inner", "sliced"])
def test_rms_norm_ops_of_any_layout(layout):
    x = {
        "transposed": normal(3, 4, 8).transpose(0, 1),
        "inner": normal(4, 8, 3).mT,
        "sliced": normal(4, 3, 16)[..., :8],
    }[layout]
    weight, ops = normal(8), torch.ops.csd
    torch.library.opcheck(ops.rms_norm.default, (x, weight, 1e-5))
    torch.library.opcheck(ops.add_rms_norm.default, (x, weight, 1e-5, normal(4, 3, 8)))
    for y in (*rms_norm(x, weight, 1e-5, x), rms_norm(x, weight, 1e-5)[0]):
        assert y.is_contiguous()
    for residual in (None, x):
        got, want = (f(x, weight, 1e-5, residual) for f in (rms_norm_triton, rms_norm_ref))
        torch.testing.assert_close(got, want)


def test_rms_norm_of_zeros_and_large_values():
    x = torch.zeros(3, 48)
    x[1], x[2] = 1e15, -1e-15
    y = rms_norm_triton(x, torch.ones(48), 1e-5)[0]
    torch.testing.assert_close(y, rms_norm_ref(x, torch.ones(48), 1e-5)[0])
    assert (y[0] == 0).all() and (y[1] == 1).all()


def exact_rotary(x, case):
    cos, sin = (case[n].double()[case["position"].long()][:, None] for n in ("cos", "sin"))
    out, half = x.double(), cos.shape[-1] // 2
    out, x = out.clone(), out[..., : 2 * half]
    out[..., :half] = x[..., :half] * cos[..., :half] - x[..., half:] * sin[..., :half]
    behind = slice(half, 2 * half)
    out[..., behind] = x[..., half:] * cos[..., half:] + x[..., :half] * sin[..., half:]
    return out


@pairs
@pytest.mark.parametrize(
    "M,H,K,D,turned",
    [
        (1, 1, 1, 2, 2),
        (3, 9, 3, 64, 64),
        (2, 14, 2, 96, 96),
        (5, 8, 1, 128, 128),
        (3, 6, 2, 128, 96),
        (2, 2, 1, 80, 20),
        (1, 4, 4, 8, 2),
    ],
)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "apart"])
@each(rotary_triton, loops.rotary)
def test_rotary(run, M, H, K, D, turned, fused, dtype, poison):
    case = rotary_case(M, H, K, D, dtype, fused, turned)
    exact_q, exact_k = exact_rotary(case["q"], case), exact_rotary(case["k"], case)
    eager_q = rotary_ref(**case)
    eager_k = case["node_k"].clone()
    assert torch.equal(case["node_v"], case["v"])
    case["node_k"].fill_(float("nan")), case["node_v"].fill_(float("nan"))
    within_eager(run(**case), eager_q, exact_q)
    within_eager(case["node_k"], eager_k, exact_k)
    assert torch.equal(case["node_v"], case["v"])


@pairs
@pytest.mark.parametrize("shape", [(1, 2), (3, 126), (2, 2, 3000)], ids=str)
@pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu"])
@each(swiglu_triton, loops.swiglu)
def test_swiglu(run, gelu, shape, dtype, poison):
    x = 4 * normal(*shape, dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    exact = (F.gelu(gate, approximate="tanh") if gelu else gate / (1 + (-gate).exp())) * up
    within_eager(run(x, gelu), swiglu_ref(x, gelu), exact)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("run", [swiglu_triton, loops.swiglu], ids=["triton", "loop"])
def test_swiglu_saturates(run):
    x = torch.tensor([[-200.0, 200.0, 0.0, -1e20, 1.0, 1.0, 7.0, 1.0]])
    for gelu in (False, True):
        assert torch.equal(run(x, gelu), torch.tensor([[0.0, 200.0, 0.0, 0.0]]))


@pytest.mark.parametrize("run", [swiglu_triton, loops.swiglu], ids=["triton", "loop"])
def test_swiglu_keeps_what_is_no_number(run):
    x = torch.tensor([[float("nan"), float("inf"), 1.0, 1.0]])
    assert run(x)[0].isnan().tolist() == [True, False] and run(x)[0, 1] == float("inf")


@pytest.mark.parametrize("width", [64, 1543])
def test_loops_in_bfloat16_round_as_the_references_do(width):
    x, weight = 3 * normal(9, width, dtype=torch.bfloat16), normal(width, dtype=torch.bfloat16)
    (y, r), (want, total) = loops.rms_norm(x, weight, 1e-5, x), rms_norm_ref(x, weight, 1e-5, x)
    # the statistics are a sum, whose order is free
    assert torch.equal(r, total) and ((y - want).abs() <= 2**-7 * want.abs()).all()
    gate_up = 3 * normal(9, 2 * width, dtype=torch.bfloat16)
    y, want = loops.swiglu(gate_up, True), swiglu_ref(gate_up, True)
    # exponentials of two kinds, behind which two numbers are rounded
    assert ((y - want).abs() <= 2**-6 * want.abs()).all()
    y, want = (f(x, weight, 1e-5, plus_one=True)[0] for f in (loops.rms_norm, rms_norm_ref))
    assert ((y - want).abs() <= 2**-7 * want.abs()).all()
    case = rotary_case(9, 6, 2, 64, torch.bfloat16, True)
    want = rotary_ref(**case), case["node_k"].clone(), case["node_v"].clone()
    got = loops.rotary(**case), case["node_k"], case["node_v"]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    # rounding keeps what is no number, and carries into infinity
    x = torch.tensor([[float("nan"), 3.389e38, -0.0, 1e-40]])
    halves = torch.cat([x, torch.full_like(x, 1.0)], 1).bfloat16()
    assert loops.swiglu(halves).isnan().tolist() == swiglu_ref(halves).isnan().tolist()
    x = x.bfloat16()
    twice = loops.rms_norm(x, x[0], 1e-5, x)[1]
    assert str(twice.tolist()) == str((x + x).tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ops(dtype):
    """CPU tensors run the loops; the operators pass opcheck."""
    x, weight = normal(3, 10, dtype=dtype), normal(10, dtype=dtype)
    case = rotary_case(3, 4, 2, 8, dtype)
    case["node_k"].zero_(), case["node_v"].zero_()
    ops = torch.ops.csd
    torch.library.opcheck(ops.rms_norm.default, (x, weight, 1e-5))
    torch.library.opcheck(ops.add_rms_norm.default, (x, weight, 1e-5, x + 1))
    torch.library.opcheck(ops.swiglu.default, (x,))
    torch.library.opcheck(ops.swiglu.default, (x, True))
    torch.library.opcheck(ops.rms_norm.default, (x, weight, 1e-5, True))
    torch.library.opcheck(ops.add_rms_norm.default, (x, weight, 1e-5, x + 1, True))
    for y, same in (
        (swiglu(x, True), loops.swiglu(x, True)),
        (rms_norm(x, weight, 1e-5, plus_one=True), loops.rms_norm(x, weight, 1e-5, plus_one=True)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(y, same, strict=True))
    torch.library.opcheck(ops.rotary.default, tuple(case.values()))
    assert torch.equal(rms_norm(x, weight, 1e-5)[0], loops.rms_norm(x, weight, 1e-5)[0])
    assert rms_norm(x, weight, 1e-5)[1] is x
    pair = zip(rms_norm(x, weight, 1e-5, x), loops.rms_norm(x, weight, 1e-5, x), strict=True)
    assert all(torch.equal(a, b) for a, b in pair)
    assert torch.equal(swiglu(x), loops.swiglu(x))
    assert torch.equal(rotary(**case), loops.rotary(**case))


def test_errors():
    x, case = torch.zeros(2, 6), rotary_case(3, 4, 2, 8, torch.float32)
    for call, message in (
        (lambda: rms_norm(x, torch.ones(5), 1e-5), r"weight must have shape \(6,\), got \(5,\)"),
        (lambda: rms_norm(x, torch.ones(6).half(), 1e-5), r"weight must be torch\.float32"),
        (
            lambda: rms_norm(x, torch.ones(6), 1e-5, x[:1]),
            r"must have shape \(2, 6\), got \(1, 6\)",
        ),
        (lambda: swiglu(x[:, :5]), r"gate_up must be \[\.\., 2F\], got \(2, 5\)"),
        (lambda: swiglu(x.T), "gate_up must be contiguous, got strides"),
        (lambda: rotary(**(case | {"sin": x})), r"sin must have shape \(50, 8\), got \(2, 6\)"),
        (lambda: rotary(**(case | {"q": torch.zeros(3, 5, 8)})), r"H a multiple of K, got \(3, 5"),
        (
            lambda: rotary(**(case | {"v": torch.zeros(3, 8, 2).mT})),
            "rows of v must be contiguous, got strides",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


class Elsewhere(torch.Tensor):
    """A tensor that stands for another one, as those of a group of processes do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def own(x):
            return x.inner if isinstance(x, cls) else x

        return function(*map(own, args), **{k: own(x) for k, x in (kwargs or {}).items()})


@pytest.mark.parametrize("other", ["float32 weight", "elsewhere"])
def test_a_loop_reads_only_memory_of_one_dtype(other):
    x, weight = (normal(*shape, dtype=torch.bfloat16) for shape in ((3, 64), (64,)))
    if other == "elsewhere":
        given = Elsewhere(x), weight
        with pytest.raises(TypeError, match="swiglu with kernels='cpu' takes"):
            loops.swiglu(Elsewhere(normal(3, 64, dtype=torch.bfloat16)))
    else:
        given = x, weight.float()
    with pytest.raises(TypeError, match="rms_norm with kernels='cpu' takes"):
        loops.rms_norm(*given, 1e-5)
