"""Every operation of a step in every backend that runs here, checked, then timed.

    pytest bench/micro --benchmark-only [-k "rms_norm and smollm2"] [--benchmark-json F]

pytest-benchmark times the backends: "reference" and "cpu" on a CPU, also "triton" on a GPU. Without
--benchmark-only each operation is called once, as a test. Attention is compared to PyTorch's own
operations.
"""

import pytest
import torch

from bench.lib.kernel_shape import Shape
from bench.lib.shapes import SHAPES
from bench.micro.jobs.attention_job import JobShape, error_of, limit_for, make
from bench.micro.jobs.attention_rivals import FULL_RIVALS, RIVALS
from bench.micro.jobs.state_jobs import makers as state_makers
from bench.micro.jobs.step_jobs import makers
from bench.micro.jobs.step_state import Sizes
from csd.kernels.attention import tree_attention_ref
from csd.kernels.backends import choose
from csd.kernels.common.cpu import compiles

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = ["triton"] if DEVICE.type == "cuda" else ["reference", *["cpu"] * compiles()]
STEPS = {
    "tiny": Sizes(slots=4, groups=2, rows=20, text=40),
    "smollm2-135m": Sizes(slots=8, groups=1, rows=72, text=300),
}
ATTENTION = {
    "tiny": JobShape("tiny", 4, 2, 16, samples=3, nodes=5, prompt=70, committed=40),
    "smollm2-135m": JobShape("smollm2-135m", 9, 3, 64, 8, nodes=9, prompt=64, committed=300),
}
# tokens of a layer's window, and the length of a sample's text in windows
WINDOW, WINDOWS = 512, (1, 8)
# eager flex_attention stores every score: it is checked as a test, but its time is not meaningful
PARTS = {name: f for name, f in (RIVALS | FULL_RIVALS).items() if "flex" not in name}
SHAPES_HERE = list(STEPS)


def step_makers(backend: str, shape: str, sizes: Sizes, dtype=torch.float32) -> dict:
    """Builders of jobs by operation and graph; each takes a seed."""
    ops = choose(backend, DEVICE, dtype)
    made = makers(ops, Shape.of(shape, SHAPES[shape]), sizes, DEVICE, dtype)
    by_name = {" ".join([m.func.__name__, *m.keywords.values()]): m for m in made}
    return by_name | state_makers(ops, shape == "tiny", sizes, DEVICE, dtype)


OPERATIONS = list(step_makers("reference", "tiny", STEPS["tiny"]))


def settled(call):
    """Returns the call, followed by a synchronisation on a GPU."""
    if DEVICE.type == "cpu":
        return call

    def whole():
        result = call()
        torch.cuda.synchronize()
        return result

    return whole


@pytest.mark.parametrize("shape", SHAPES_HERE)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_step(benchmark, operation, backend, shape):
    job = step_makers(backend, shape, STEPS[shape])[operation](0)
    job.check()
    benchmark(settled(job.call))


@pytest.mark.parametrize("shape", SHAPES_HERE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tree_attention(benchmark, backend, shape):
    job = make(ATTENTION[shape], DEVICE, torch.float32)
    ops = choose(backend, DEVICE, torch.float32)
    where = {name: x for name, x in job.arguments.items() if name in job.layout._fields}
    work = ops.plan_attention(heads=job.shape.H, kv_heads=job.shape.K, **where)
    call = settled(lambda: ops.tree_attention(**job.arguments, work=work))
    exact = tree_attention_ref(**job.to(torch.float64).arguments)
    assert error_of(benchmark(call), exact) <= limit_for(torch.float32)


@pytest.mark.parametrize("window", [None, WINDOW], ids=["full", "window"])
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tree_attention_with_a_window(benchmark, backend, windows, window):
    """A layer with a window and a full layer, for texts of one window and longer ones."""
    prompt, own = 64, windows * WINDOW - 64
    # lengths are at least half of the mean, so all samples have pages for `own` tokens
    shape = JobShape("smollm2-135m", 9, 3, 64, 8, nodes=9, prompt=prompt, committed=2 * own)
    job = make(shape, DEVICE, torch.float32)
    job.slot_len.fill_(own)
    ops = choose(backend, DEVICE, torch.float32)
    where = {name: x for name, x in job.arguments.items() if name in job.layout._fields}
    work = ops.plan_attention(heads=9, kv_heads=3, window=window, **where)
    call = settled(lambda: ops.tree_attention(**job.arguments, work=work, window=window))
    exact = tree_attention_ref(**job.to(torch.float64).arguments, window=window)
    assert error_of(benchmark(call), exact) <= limit_for(torch.float32)


@pytest.mark.parametrize("shape", SHAPES_HERE)
@pytest.mark.parametrize("name", PARTS)
def test_tree_attention_of_parts(benchmark, name, shape):
    job = make(ATTENTION[shape], DEVICE, torch.float32)
    exact = tree_attention_ref(**job.to(torch.float64).arguments)
    call, order = PARTS[name](job)
    assert error_of(order(benchmark(settled(call))), exact) <= limit_for(torch.float32)
