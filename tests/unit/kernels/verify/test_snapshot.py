"""The snapshot of a step: the kernel and its operator against plain PyTorch."""

from importlib import import_module

import pytest
import torch

from csd.kernels.verify.layout import layout
from csd.kernels.verify.snapshot import snapshot, snapshot_ref, snapshot_triton
from csd.state.pool import MAX_DEPTH, Pool
from csd.state.verdict import TOP, Verdict

pytestmark = pytest.mark.compiled

A = MAX_DEPTH + 1


def step(S, M, seed=0, dtype=torch.float32):
    """Any integers where the host only carries them; paths of any length."""
    generator = torch.Generator().manual_seed(seed)

    def ints(*shape, low=-1, high=1000):
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    pool = Pool.empty(M, S, S, 3)
    for name in ("token", "parent", "cost", "source", "slot_start", "slot_nodes"):
        x = getattr(pool, name)
        x.copy_(ints(*x.shape))
    pool.depth.copy_(ints(M, low=0, high=3))
    count = ints(S, low=0, high=A + 1)
    count[0], count[-1] = 0, A
    row = torch.where(torch.arange(A) < count[:, None], ints(S, A, low=0, high=M), -1)
    floats = [torch.rand(M, generator=generator, dtype=dtype) for _ in range(2)]
    verdict = Verdict(
        ints(M),
        *floats,
        ints(M, TOP),
        torch.rand(M, TOP, generator=generator),
        row.int(),
        count,
        ints(S, low=0, high=3),
        ints(S, low=0, high=2).bool(),
    )
    return pool, verdict


@pytest.mark.parametrize("top", [False, True])
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize(("S", "M"), [(1, 1), (3, 130), (70, 64)])
def test_equals_the_reference(poison, S, M, top, trees):
    pool, verdict = step(S, M)
    want = snapshot_ref(pool, verdict, top, trees)
    for run in (snapshot_triton, snapshot):
        for got, x in zip(run(pool, verdict, top, trees), want, strict=True):
            assert got.dtype == x.dtype and torch.equal(got, x)
    for x, places in zip(want, layout(S, M, A, top, trees), strict=True):
        name, shape, at = places[-1]
        assert at + torch.Size(shape).numel() == x.numel(), name


def test_a_token_comes_from_the_row_below_it():
    pool, verdict = step(1, 5)
    pool.source.copy_(torch.tensor([0, 1, 2, 3, 1]))
    verdict.accept_row.fill_(-1)
    verdict.accept_row[0, :3] = torch.tensor([0, 3, 2])
    verdict.accept_count.fill_(3)
    ints, floats = snapshot(pool, verdict)
    got = {name: ints[at:] for name, _, at in layout(1, 5, A, False, False)[0]}
    # the last token was sampled off the tree
    assert got["sources"][:4].tolist() == [3, 2, 0, 0]
    assert torch.equal(got["tokens"][:3], verdict.sample[[0, 3, 2]])
    assert torch.equal(floats[:3], verdict.logprob[[0, 3, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operator(dtype):
    pool, verdict = step(3, 20, dtype=dtype)
    assert snapshot(pool, verdict, True, True)[1].dtype == dtype
    module = import_module("csd.kernels.verify.snapshot")

    args = module._snapshot.pack(pool, verdict, True, True)
    torch.library.opcheck(torch.ops.csd.snapshot.default, tuple(args))


def test_shapes_are_checked():
    pool, verdict = step(3, 20)
    verdict.sample = verdict.sample[:-1]
    with pytest.raises(ValueError, match=r"verdict.sample must have shape \(20,\), got \(19,\)"):
        snapshot(pool, verdict)
