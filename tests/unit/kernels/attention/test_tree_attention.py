"""Attention over trees, its reference and its kernel, against all keys gathered."""

import pytest
import torch
from helpers.kernels.attention_cases import attention_case, dense_attention, laid_out, within_eager
from helpers.targets import few, pairs
from triton.runtime.interpreter import InterpretedFunction

from csd.kernels.attention import tree_attention, tree_attention_ref, tree_attention_triton
from csd.kernels.attention.cpu import attention
from csd.kernels.attention.triton import launch as module
from csd.kernels.attention.triton.kernel import tree_attention_kernel
from csd.kernels.attention.triton.plan import plan_attention_triton
from csd.kernels.numba.isa import instructions
from csd.kernels.numba.lanes import FEATURES
from csd.kernels.numba.tiles import ISA

pytestmark = pytest.mark.compiled

CASES = {
    "one-row": dict(trees=[{0: 1}], prompt=[0], committed=[0]),
    "empty-prompt": dict(trees=[{0: 5, 1: 3}], prompt=[0], committed=[70, 1]),
    "empty-committed": dict(trees=[{0: 4}], prompt=[65], committed=[0]),
    "roots-only": dict(trees=[{0: 1, 1: 1, 2: 1}], prompt=[9], committed=[3, 0, 64]),
    "64-nodes": dict(trees=[{0: 64}], prompt=[3], committed=[2]),
    "groups-out-of-order": dict(
        trees=[{3: 7, 1: 2}, {}, {0: 3, 4: 1}],
        prompt=[130, 5, 40],
        committed=[17, 129, 8, 0, 64],
        padding=3,
    ),
}


EACH = pytest.mark.parametrize(
    "attend",
    [tree_attention_ref, attention.tree_attention],
    ids=["reference", "loop"],
)


@pairs
@EACH
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (14, 2)], ids=str)
def test_on_a_cpu_in_float64(attend, name, heads):
    case = attention_case(**CASES[name], heads=heads)
    torch.testing.assert_close(attend(**case), dense_attention(case))


def assert_sums_in_float32(out, case):
    """Within one step of the result's dtype and twice the error of eager sums in float32."""
    exact = dense_attention(case)
    sums = (dense_attention(case, torch.float32).double() - exact).abs().max()
    eps, eps_32 = torch.finfo(out.dtype).eps, torch.finfo(torch.float32).eps
    limit = eps * exact.abs() + 2 * sums + eps_32 * exact.abs().max()
    assert ((out.double() - exact).abs() <= limit).all()


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_on_a_cpu_in_low_precision(attend, dtype):
    if attend is attention.tree_attention and dtype == torch.float16:
        pytest.skip("loops do not read float16")
    case = attention_case(**CASES["groups-out-of-order"], heads=(6, 2), dtype=dtype)
    out = torch.full_like(case["q"], float("nan"))
    assert attend(**case, out=out) is out
    assert out.dtype == dtype
    assert_sums_in_float32(out, case)


@pairs
@pytest.mark.skipif("+avx512bf16" not in FEATURES, reason="the CPU does not have it")
@pytest.mark.parametrize("by", [by for by in instructions(torch.bfloat16) if by != "fma"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("heads,D", [((6, 2), 64), ((14, 2), 64), ((3, 3), 96), ((5, 1), 256)])
def test_on_a_cpu_by_pairs_of_bfloat16(monkeypatch, name, heads, D, by):
    kinds = attention.attention_kinds(torch.bfloat16, D, by)
    monkeypatch.setattr(attention, "attention_kinds", lambda dtype, D: kinds)
    case = attention_case(**CASES[name], heads=heads, D=D, dtype=torch.bfloat16)
    out = torch.full_like(case["q"], float("nan"))
    within_eager(attention.tree_attention(**case, out=out), case)


@pytest.mark.parametrize("shares", [(1, 2), (2, 1), (1, 3), (2, 9)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_shares_of_heads_and_rows_on_a_cpu(monkeypatch, dtype, shares):
    """A part may begin within a slot's tree, or have no row."""
    for name in ("groups-out-of-order", "64-nodes", "roots-only"):
        case = attention_case(**CASES[name], heads=(6, 2), D=64, dtype=dtype)
        monkeypatch.setattr(attention, "shares", lambda *_: (1, 1))
        whole = attention.tree_attention(**case)
        monkeypatch.setattr(attention, "shares", lambda *_: shares)
        out = torch.full_like(case["q"], float("nan"))
        assert torch.equal(attention.tree_attention(**case, out=out), whole)


def test_shares_are_even_and_heads_stay_together_where_slots_are_many(monkeypatch):
    for threads, trees, expected in (
        (1, [{0: 1}], (3, 1)),
        (2, [{0: 9}], (3, 2)),
        (2, [{i: 2 for i in range(4)}], (1, 2)),
        (2, [{0: 1}, {1: 1}, {2: 1, 3: 1}], (1, 2)),
        (8, [{0: 1}, {1: 1}], (3, 4)),
    ):
        monkeypatch.setattr(attention, "threads", lambda threads=threads: threads)
        slots = sum(map(len, trees))
        case = attention_case(trees, [3] * len(trees), [1] * slots, heads=(6, 3))
        assert attention.shares(attention.plan_attention(6, 3, **case), 3) == expected


def test_by_which_instruction_a_cpu_attends(monkeypatch):
    for taken, D, by in (
        ("dot", 64, "dot"),
        ("dot", 80, "fma"),
        ("fma", 64, "fma"),
        (None, 64, "fma"),
    ):
        monkeypatch.setattr(attention, "instruction", lambda dtype, taken=taken: taken)
        assert attention.attention_kinds(torch.bfloat16, D)[2] is ISA[by]


@EACH
def test_a_long_sample_and_a_path_deeper_than_any_of_csd(attend):
    case = attention_case([{0: 64, 1: 2}], [90], [700, 0], heads=(3, 1))
    case["ancestors"][:64] = torch.tensor([(1 << j + 1) - 1 if j < 63 else -1 for j in range(64)])
    torch.testing.assert_close(attend(**case), dense_attention(case))


@few(12)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "heads,D,dtype",
    [
        ((6, 2), 64, torch.float16),
        ((7, 1), 128, torch.float16),
        ((2, 2), 96, torch.float16),
        ((8, 1), 256, torch.float16),
        ((3, 1), 8, torch.float32),
        ((4, 2), 256, torch.float32),
    ],
    ids=str,
)
def test_tree_attention_triton(name, heads, D, dtype, poison):
    case = attention_case(**CASES[name], heads=heads, D=D, dtype=dtype)
    within_eager(tree_attention_triton(**laid_out(case)), case)


@pytest.mark.parametrize("programs", [1, 2, 9])
def test_tree_attention_triton_any_number_of_programs(programs, poison):
    case = attention_case([{0: 9, 1: 30}, {2: 2}], [300, 70], [200, 64, 0], (5, 1), 32)
    for key in ("q", "node_k", "node_v", "k_pages", "v_pages"):
        case[key] = case[key].float()
    work = plan_attention_triton(laid_out(case)["layout"], 5, 1, programs)
    out = torch.full_like(case["q"], float("nan"))
    assert tree_attention_triton(**laid_out(case), work=work, out=out) is out
    within_eager(out, case)


def test_tree_attention_triton_rows_that_see_no_key_in_a_block(monkeypatch):
    # rows 20 and up see themselves only: every block of keys before is hidden from them
    small = dict(BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=1)
    monkeypatch.setattr(module, "_tiles", lambda *_: small)
    case = attention_case([{0: 40}], [0], [0], (1, 1), 16, dtype=torch.float32)
    words = torch.tensor([1 << j for j in range(40)])
    case["ancestors"] = words | torch.where(torch.arange(40) < 20, 1, 0)
    within_eager(tree_attention_triton(**laid_out(case)), case)


def test_tree_attention_triton_bfloat16(poison):
    case = attention_case(**CASES["groups-out-of-order"], heads=(6, 2), dtype=torch.bfloat16)
    out = tree_attention_triton(**laid_out(case))
    within_eager(out, case)
    if isinstance(tree_attention_kernel, InterpretedFunction):
        # its products are float32's; its stores round towards zero, by a whole step
        assert_sums_in_float32(out, case)


def test_tree_attention_triton_without_rows():
    case = attention_case([{}], [5], [3], (2, 1), 16, dtype=torch.float32)
    assert tree_attention_triton(**laid_out(case)).shape == (0, 2, 16)
    assert tree_attention_ref(**case).shape == (0, 2, 16)
    with pytest.raises(ValueError, match="q must be float16, bfloat16 or float32, got torch"):
        tree_attention_triton(**laid_out(case | {"q": case["q"].double()}))


def test_tree_attention_op():
    case = attention_case(**CASES["groups-out-of-order"], heads=(6, 2), dtype=torch.float32)
    for key in ("q", "node_k", "node_v", "k_pages", "v_pages"):
        case[key] = case[key].nan_to_num()
    assert torch.equal(tree_attention(**laid_out(case)), attention.tree_attention(**case))
    out = torch.empty_like(case["q"])
    args = *case.values(), [], out, *[None] * 4
    torch.library.opcheck(torch.ops.csd.tree_attention.default, args)


@pytest.mark.parametrize(
    "name,value,message",
    [
        ("node_v", torch.zeros(16, 2, 8), r"v_pages must have .* 2, 8\), got .* 2, 16\)"),
        ("k_pages", torch.zeros(9, 32, 2, 16), r"k_pages must have shape \(9, 64, 2, 16\)"),
        ("ancestors", torch.zeros(16, dtype=torch.int32), r"must be torch\.int64"),
        ("q", torch.zeros(16, 5, 16), "H must be 1 to 64 times K, got H=5, K=2"),
        ("q", torch.zeros(16, 96), r"q and node_k must be .* got \(16, 96\)"),
        ("node_k", torch.zeros(16, 2, 16).half(), r"node_k must be torch\.float32, got"),
        ("node_k", torch.zeros(16, 16, 2).mT, "node_k must be contiguous, got strides"),
        ("scale", -1.0, r"scale must be positive, got -1\.0"),
        ("slot_nodes", torch.zeros(3, dtype=torch.int32), r"must have shape \(5,\), got \(3,\)"),
    ],
    ids=lambda x: x if isinstance(x, str) and x.isidentifier() else "",
)
def test_tree_attention_errors(name, value, message):
    case = attention_case(**CASES["groups-out-of-order"], heads=(6, 2), dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        tree_attention(**laid_out(case | {name: value}))
