"""Operations on single rows have the same bits whatever else the step holds."""

import pytest
import torch
import torch.nn.functional as F

from csd.kernels.backends import loops as cpu_backend
from csd.kernels.layers.swiglu import swiglu_ref
from csd.kernels.ops import reference
from csd.kernels.verify import reference_rows as verify


@pytest.fixture
def threads():
    """Two, whatever the tests run with: sums over long rows are split among them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.manual_seed(0)).to(dtype)


def same_for_every_number_of_rows(function, x):
    whole = function(x)
    return all(
        torch.equal(function(x[at : at + n].clone()), whole[at : at + n])
        for at in (0, 3)
        for n in (1, 2, 3, 8, 27)
    )


EACH = pytest.mark.parametrize(
    "ops, dtype",
    [
        (ops, dtype)
        for ops in (reference(), cpu_backend())
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        if ops.name == "reference" or dtype != torch.float16
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)


@EACH
def test_gates_and_norms(threads, ops, dtype):
    # no multiple of a vector's width, and enough for both threads
    weight = random(1543, dtype=dtype)
    assert same_for_every_number_of_rows(ops.swiglu, random(40, 2 * 1543, dtype=dtype))
    assert same_for_every_number_of_rows(
        lambda x: ops.rms_norm(x, weight, 1e-5)[0], random(40, 1543, dtype=dtype)
    )


@EACH
@pytest.mark.parametrize("D", [16, 22, 64])
def test_rotary(threads, ops, D, dtype):
    cos, sin = random(60, D, dtype=dtype).cos(), random(60, D, dtype=dtype).sin()

    def rotated(x):
        # its place in the step is not its position: that is another row's
        position = x[:, 0, 0].long().remainder(50).int()
        k, v = torch.empty(2, x.shape[0], 3, D, dtype=dtype)
        q = ops.rotary(x[:, :9], x[:, 9:12], x[:, 12:], position, cos, sin, k, v)
        return torch.cat((q, k, v), 1)

    assert same_for_every_number_of_rows(rotated, 30 * random(40, 15, D, dtype=dtype))


def gate_of(x):
    return swiglu_ref(torch.cat([x, torch.ones_like(x)]))


# without vectors nothing is left behind them
SCALAR = torch.backends.cpu.get_cpu_capability() == "DEFAULT"


@pytest.mark.parametrize("gate,same", [(gate_of, True), (F.silu, SCALAR)])
def test_a_gate_does_not_depend_on_its_place(gate, same):
    x = random(4000)
    whole = gate(x)
    assert same == all(torch.equal(gate(x[:n].clone()), whole[:n]) for n in range(1, 70))


def test_sums_over_a_vocabulary(threads):
    x = random(20, 40_000).exp()
    assert same_for_every_number_of_rows(verify.row_sum, x)
    assert not same_for_every_number_of_rows(lambda x: x.sum(-1), x)


def test_sums_over_heads_of_the_longest_row():
    x = random(20, 300).exp()
    longer = [F.pad(x, (0, n)) for n in (0, 1, 7, 64, 724)]
    assert all(torch.equal(verify.head_sum(y), verify.head_sum(x)) for y in longer)
    assert not all(torch.equal(y.sum(-1), x.sum(-1)) for y in longer)
