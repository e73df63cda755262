"""Launches on a GPU that is not there: of a replay, of operators alone and of a forced run."""

import pytest
import torch
from helpers.checks.nested import leaves_of
from helpers.checks.operators import OPERATORS
from helpers.checks.precision import within_eager
from helpers.runs.simulated_calls import engine
from simulated_gpu import Gpu
from simulated_gpu.tensor import CUDA

import csd
from bench.lib.forced import forced_requests, forcing
from bench.lib.shapes import random_model
from csd.engine.call import RunSettings
from csd.engine.step import static_step
from csd.kernels.attention.triton.merge import merge_partials, merge_partials_ref
from csd.kernels.layers.rms_norm import rms_norm
from csd.kernels.layers.rotary import rotate
from csd.kernels.layers.swiglu import silu_mul
from csd.kernels.ops import triton
from csd.traces.traces import Trace

pytestmark = pytest.mark.stand_in


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch):
    monkeypatch.setattr(static_step, "SIZES", (16, 32))


@pytest.mark.parametrize("ops", [triton(), OPERATORS], ids=["kernels", "operators"])
def test_a_replay_is_kernels_of_csd_and_products(ops):
    with Gpu(compiled=True, idle=True) as gpu, engine("cuda") as e:
        e.ops = ops
        job = forced_requests([Trace("a", [5, 6, 7], [[8, 9]], 0.7, None, 1, [0])])
        step = e.caches.prepare(job, "consensus")
        step.drafter = e.caches.drafter
        step.start(16, 16, [None], 1)
        ((graph, _),) = step.captures.graphs.values()
        layers = e.config.layers
        rest = {n: k for n, k in graph.names.items() if not n.endswith("_kernel")}
        # an operator takes no rows of a table, and none does the work of several
        whole = ops is not OPERATORS
        found = {"mm": 4 * layers + 1} | ({} if whole else {"clamp": 1, "embedding": 1})
        assert rest == found
        launched = sum(graph.names.values()) - sum(rest.values())
        assert launched == 8 * layers + (14 if whole else 17)
        assert gpu.launched["finish_kernel" if whole else "snapshot_kernel"] == 3


def test_operators_launch_their_kernels():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    q, k, table = normal(5, 4, 8), normal(5, 2, 8), normal(2, 5, 8)
    merge = torch.tensor([[0, 1, 4, 2], [2, 0, 4, 1]], dtype=torch.int32)
    calls = [
        (rotate, (q, k, *table)),
        (silu_mul, (normal(3, 10), normal(3, 10))),
        (rms_norm, (normal(3, 8), normal(8), 1e-5)),
        (rms_norm, (normal(3, 8), normal(8), 1e-5, normal(3, 8))),
        (merge_partials, (normal(2, 12, 8), normal(2, 12), merge, 4, torch.zeros(2, 4, 8))),
    ]
    for function, args in calls:
        want = leaves_of(function(*args))
        wide = (x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in args)
        exactly = merge_partials_ref if function is merge_partials else function
        exact = leaves_of(exactly(*wide))
        with Gpu(compiled=True) as gpu:
            got = function(*(x.to(CUDA) if isinstance(x, torch.Tensor) else x for x in args))
            assert any(name.endswith("_kernel") for name in gpu.launched)
            for a, *others in zip(leaves_of(got), want, exact, strict=True):
                within_eager(a.cpu(), *others, 10)


def test_a_forced_run_commits_the_trace():
    """In bfloat16, behind a prompt of two chunks."""
    tokens = [[(7 * i + j) % 90 for j in range(9)] for i in range(5)]
    trace = Trace("a", list(range(20)), tokens, 0.7, None, 1, list(range(5)))
    with Gpu() as gpu:
        model = random_model("tiny", "cuda", torch.bfloat16)
        with csd.Engine(model, max_slots=5, self_check=False) as e, forcing(e, [trace]):
            for budget in (16, "auto", "auto"):
                # the first run measures and captures, and the first "auto" what that one did not
                gpu.waits.clear()
                jobs = forced_requests([trace], prompt_tokens=600)
                for _ in e.run(jobs, RunSettings(budget=budget)):
                    pass
                assert jobs[0].result().tokens == trace.samples
            assert not gpu.waits
        # not what PyTorch would choose
        assert gpu.launched["_flash_attention_forward"]
        assert not gpu.launched["scaled_dot_product_attention"]
