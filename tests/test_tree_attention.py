import pytest
import torch
from attention_cases import attention_case, dense_attention

from csd.kernels.tree_attention import host_work, tree_attention_ref

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


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (14, 2)], ids=str)
def test_tree_attention_ref_float64(name, heads):
    case = attention_case(**CASES[name], heads=heads)
    torch.testing.assert_close(tree_attention_ref(**case), dense_attention(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tree_attention_ref_low_precision(dtype):
    case = attention_case(**CASES["groups-out-of-order"], heads=(6, 2), dtype=dtype)
    exact = dense_attention(case)
    out = tree_attention_ref(**case)
    assert out.dtype == dtype
    # sums are float32 at least, so the error is float32's and one rounding of the result
    step = torch.finfo(dtype).eps * exact.abs() + 64 * torch.finfo(torch.float32).eps
    assert ((out.double() - exact).abs() <= step).all()


def test_tree_attention_ref_consecutive_pages():
    shape = dict(CASES["groups-out-of-order"])
    case = attention_case(**shape, shuffle=False)
    work = host_work(*list(case.values())[5:14])
    assert any(isinstance(s.tokens, slice) and s.count > 64 for g in work for s in g.slots)
    out = torch.full_like(case["q"], float("nan"))
    result = tree_attention_ref(**case, work=work, out=out)
    assert result is out
    torch.testing.assert_close(out, dense_attention(case))
