"""Short convolutions along the paths of trees, against PyTorch's over each path's text."""

import pytest
import torch
import torch.nn.functional as F
from state_cases import NAN, trees

from csd.kernels.common.cpu import compiles
from csd.kernels.states.conv import tree_conv, tree_conv_ref, tree_conv_triton
from csd.kernels.states.paths import tree_paths

pytestmark = pytest.mark.compiled

RUNS = [tree_conv_ref, tree_conv_triton, tree_conv]
if compiles():
    from csd.kernels.states.cpu.conv import tree_conv as tree_conv_loop

    RUNS.append(tree_conv_loop)


def conv_case(lengths, nodes, W=4, C=7, dtype=torch.float32, bias=True, seed=0):
    t = trees(lengths, nodes, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    x, weight = normal(t.slot.shape[0], C), normal(C, W)
    x[t.slot < 0] = NAN
    tail = torch.full((len(lengths), W - 1, C), NAN, dtype=dtype)
    texts = [normal(n, C) for n in lengths]
    for s, text in enumerate(texts):
        for p in range(max(0, len(text) - W + 1), len(text)):
            tail[s, p % (W - 1)] = text[p]
    return (x, weight, normal(C) if bias else None, tail, *t.where()), t, texts


def along_paths(given, t, texts, silu, dtype):
    """Each row by PyTorch's convolution, with its operands of a dtype."""
    x, weight, bias, *_ = given
    want = torch.zeros(x.shape, dtype=dtype)
    for m, path in enumerate(t.paths):
        text = torch.cat((texts[int(t.slot[m])], x[path])).to(dtype).T[None]
        y = F.conv1d(
            text,
            weight.to(dtype)[:, None],
            None if bias is None else bias.to(dtype),
            padding=weight.shape[1] - 1,
            groups=x.shape[1],
        )[0, :, text.shape[2] - 1]
        want[m] = F.silu(y) if silu else y
    return want


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    "case",
    [
        dict(lengths=[0, 1, 2, 3, 40], nodes=[9, 3, 1, 33, 8]),
        dict(lengths=[0, 5], nodes=[4, 9], W=2, bias=False),
        dict(lengths=[4, 70], nodes=[64, 20], W=7, C=5),
        dict(lengths=[3], nodes=[0]),
    ],
)
def test_rows_are_their_paths_convolution(run, case):
    for silu in (True, False):
        given, t, texts = conv_case(**case)
        got = run(*given, silu)
        want = along_paths(given, t, texts, silu, torch.float64)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
        assert not got[t.slot < 0].any()


@pytest.mark.parametrize("run", [RUNS[0], *RUNS[2:]])
def test_bfloat16_is_no_farther_from_float64_than_pytorchs(run):
    given, t, texts = conv_case([0, 9, 30], [20, 20, 20], dtype=torch.bfloat16)
    want = along_paths(given, t, texts, True, torch.float64)
    own = along_paths(given, t, texts, True, torch.bfloat16)
    got = run(*given, True)
    assert got.dtype == torch.bfloat16
    assert (got.double() - want).abs().max() <= 1.01 * (own.double() - want).abs().max()


@pytest.mark.parametrize("run", [tree_conv_ref, tree_conv_triton])
def test_another_ancestor_is_seen(run):
    given, t, texts = conv_case([5], [20])
    x, weight, bias, tail, slot, position, path = given
    path = path.clone()
    row = next(m for m, p in enumerate(t.paths) if len(p) > 3)
    path[row, len(t.paths[row]) - 2] = t.paths[row][0]
    got = run(x, weight, bias, tail, slot, position, path, False)
    want = along_paths(given, t, texts, False, torch.float64)
    assert (got[row].double() - want[row]).abs().max() > 1e-2


def test_tree_paths():
    t = trees([0, 4, 9], [64, 0, 30])
    path = tree_paths(t.slot, t.ancestors, t.slot_start)
    assert path.dtype == torch.int32 and path.shape == (97, 17)
    for m, rows in enumerate(t.paths):
        assert path[m].tolist() == rows + [-1] * (17 - len(rows))
    assert (path[94:] == -1).all()


def test_arguments_are_checked():
    x, weight, bias, tail, *where = conv_case([3], [4])[0]
    with pytest.raises(ValueError, match=r"tail must have shape \(\*, 3, 7\)"):
        tree_conv(x, weight, bias, tail[:, 1:].contiguous(), *where)
    with pytest.raises(ValueError, match="weight must have 2 to 17 columns, got 1"):
        tree_conv(x, weight[:, :1].contiguous(), bias, tail, *where)
