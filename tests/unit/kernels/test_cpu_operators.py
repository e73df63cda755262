"""Public operations on a CPU: loops run where they read the tensors, and the references else."""

from dataclasses import fields

import pytest
import torch
from helpers.kernels.attention_cases import attention_case
from helpers.kernels.observed_steps import random_step

pytest.importorskip("numba")

from csd.kernels.attention import TreeLayout, tree_attention
from csd.kernels.attention.commit_kv import commit_kv
from csd.kernels.common.operator import OPERATIONS, load_loops
from csd.kernels.layers.rms_norm import rms_norm
from csd.kernels.layers.rotary import rotary
from csd.kernels.layers.swiglu import swiglu
from csd.kernels.table import graph_insert
from csd.kernels.table.observe import observe
from csd.state.context_table import GraphConfig, Table

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def norm(dtype):
    x, weight = torch.randn(5, 48).to(dtype), torch.randn(48).to(dtype)
    return rms_norm(x, weight, 1e-5)[0]


def norm_of_sum(dtype):
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((5, 48), (5, 48), (48,)))
    return rms_norm(x, weight, 1e-5, residual)[0]


def turned(dtype):
    q, k, v = torch.randn(6, 8, 16).to(dtype).split([4, 2, 2], 1)
    cos, sin = torch.randn(2, 40, 16).to(dtype)
    position = torch.arange(6, dtype=torch.int32)
    return rotary(q, k, v, position, cos, sin, *torch.zeros(2, 6, 2, 16, dtype=dtype))


def gate(dtype):
    return swiglu(torch.randn(5, 96).to(dtype))


def attend(dtype):
    trees = [{3: 7, 1: 2}, {}, {0: 3, 4: 1}]
    case = attention_case(trees, [130, 5, 40], [17, 129, 8, 0, 64], (6, 2), 64, dtype=dtype)
    keys = [case.pop(name) for name in ("q", "node_k", "node_v", "k_pages", "v_pages")]
    return tree_attention(*keys, TreeLayout(**{k: case[k] for k in TreeLayout._fields}), 0.1)


def moved(dtype):
    node_k, node_v = torch.randn(2, 3, 5, 2, 8).to(dtype)
    k, v = torch.zeros(2, 3, 4, 64, 2, 8, dtype=dtype)
    table = torch.tensor([[0], [2]], dtype=torch.int32)
    rows = torch.tensor([[0, 1], [3, -1]], dtype=torch.int32)
    counts, lengths = torch.tensor([[2, 1], [5, 63]], dtype=torch.int32)
    commit_kv(node_k, node_v, k, v, table, lengths, rows, counts)
    return torch.stack((k, v))


NUMBERS = {
    "rms_norm": norm,
    "add_rms_norm": norm_of_sum,
    "rotary": turned,
    "swiglu": gate,
    "tree_attention": attend,
    "commit_kv": moved,
}
# no loop of these has float64
LOW = ("rms_norm", "add_rms_norm", "rotary", "swiglu")


@pytest.fixture
def ran(monkeypatch):
    """Names of the loops that were called."""
    load_loops()
    called = []
    for name, found in OPERATIONS.items():
        if found.loop is not None:
            loop = found.loop
            monkeypatch.setattr(
                found,
                "loop",
                lambda *args, name=name, loop=loop: called.append(name) or loop(*args),
            )
    return called


@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_loop_runs_where_it_reads_the_tensors(ran, monkeypatch, name, dtype):
    torch.manual_seed(0)
    got = NUMBERS[name](dtype)
    # what is moved has no arithmetic, so no dtype is refused
    has_loop = name == "commit_kv" or (dtype != F16 and (dtype != F64 or name not in LOW))
    assert ran == [name] * has_loop
    monkeypatch.setattr(OPERATIONS[name], "loop", None)
    torch.manual_seed(0)
    want = NUMBERS[name](dtype)
    # another order of sums, and one rounding of the result
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got, want, rtol=4 * eps, atol=16 * torch.finfo(F32).eps + eps)
    assert got.dtype == dtype and len(ran) == has_loop


def test_what_a_step_inserts(ran, monkeypatch):
    config, step = GraphConfig(orders=(1, 3), capacity=64), random_step(9, 4, 3, 1)
    found = []
    for _ in range(2):
        table = Table.empty(config)
        seen = observe(*step, config)
        graph_insert(table, *seen, step[1].group_key, config.orders)
        values = (getattr(table, f.name) for f in fields(table))
        found.append((*seen, *filter(torch.is_tensor, values)))
        for name in ("observe", "graph_insert"):
            monkeypatch.setattr(OPERATIONS[name], "loop", None)
    assert ran == ["observe", "graph_insert"]
    assert all(map(torch.equal, *found))


def test_a_subclass_of_a_tensor_is_the_references(ran):
    class Own(torch.Tensor):
        pass

    x, weight = torch.randn(3, 8).as_subclass(Own), torch.randn(8)
    assert rms_norm(x, weight, 1e-5)[0].shape == x.shape


def test_gradients_and_compiled_graphs_go_through_the_loops(ran):
    x = torch.randn(3, 48, requires_grad=True)
    weight = torch.randn(48, requires_grad=True)

    def function(x, weight):
        return (swiglu(rms_norm(x, weight, 1e-5)[0]) ** 2).sum()

    function(x, weight).backward()
    got, x.grad = x.grad, None
    assert ran == ["rms_norm", "swiglu"]
    normed = torch.nn.functional.rms_norm(x, (48,), weight, 1e-5)
    gate, up = normed.chunk(2, -1)
    ((torch.nn.functional.silu(gate) * up) ** 2).sum().backward()
    torch.testing.assert_close(got, x.grad, rtol=1e-5, atol=1e-5)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), function(x, weight))
