"""Faults that the simulated GPU finds: each a program that would fail on a real one."""

import time

import pytest
import torch
from simulated_gpu import Gpu
from simulated_gpu.clock import Clock, Killed
from simulated_gpu.tensor import CUDA

from csd.kernels.layers.rms_norm import rms_norm

pytestmark = pytest.mark.stand_in


def reads_too_soon():
    x = torch.zeros(3, device="cuda")
    host = torch.empty(3, pin_memory=True)
    host.copy_(x, non_blocking=True)
    return host.sum() == 0


def another_stream():
    x, stream = torch.zeros(3, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    x.fill_(2)
    with torch.cuda.stream(stream):
        y = x + 0
    torch.cuda.synchronize()
    return y.tolist() == [2, 2, 2]


def captured(work):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    return graph, found


def waits_in_a_capture():
    x = torch.zeros(3, device="cuda")
    captured(lambda: x.sum().item())


def copies_in_a_capture():
    x = torch.zeros(3, device="cuda")
    captured(lambda: x.copy_(torch.ones(3)))


def memory_that_is_gone():
    made = [torch.zeros(3, device="cuda")]
    graph, _ = captured(lambda: made.pop() + 1)
    graph.replay()


def two_devices():
    return torch.zeros(3, device="cuda") + torch.zeros(3)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (waits_in_a_capture, "stream is capturing"),
        (copies_in_a_capture, "stream is capturing"),
        (memory_that_is_gone, "was given back"),
        (two_devices, "on the same device"),
        (reads_too_soon, None),
        (another_stream, None),
    ],
)
def test_what_would_fail_is_found(work, message):
    with Gpu():
        if message is None:
            assert not work()
        else:
            with pytest.raises(RuntimeError, match=message):
                work()


def test_a_copy_overwrites_only_where_it_goes():
    with Gpu():
        x, host = torch.ones(2, device="cuda"), torch.zeros(5, pin_memory=True)
        host[1:3].copy_(x, non_blocking=True)
        # until the copy is done, that has neither the old values nor the new ones
        assert host.isnan().tolist() == [False, True, True, False, False]
        torch.cuda.synchronize()
        assert host.tolist() == [0, 1, 1, 0, 0]


def test_a_seed_draws_other_numbers_than_on_a_cpu():
    def drawn(device):
        generator = torch.Generator(device).manual_seed(3)
        return torch.randn(4, generator=generator, device=device).cpu()

    want = drawn("cpu")
    with Gpu():
        on_gpu, again, on_cpu = drawn("cuda"), drawn("cuda"), drawn("cpu")
        assert not (on_gpu == want).any()
        assert torch.equal(on_gpu, again) and torch.equal(on_cpu, want)


@pytest.mark.parametrize(("dtype", "differ"), [(torch.bfloat16, True), (torch.float32, False)])
def test_a_products_last_bits_may_depend_on_its_rows(dtype, differ):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(32, 32, generator=generator).to(dtype) for _ in range(2))
    for by_rows in (True, False):
        with Gpu(by_rows=by_rows):
            a, b = x.to(CUDA), y.to(CUDA)
            few, many = ((a[:rows] @ b).cpu()[:16] for rows in (16, 32))
        assert torch.equal(few, many) != (differ and by_rows)
        # in the last bits only
        torch.testing.assert_close(few, many, rtol=0, atol=32 * torch.finfo(dtype).eps)


def test_a_clock_is_charged():
    clock = Clock(compilation=2.0, capture=3.0, launch=0.5, deadline=20.0)
    with Gpu(clock=clock):
        x, weight = torch.ones(2, 8, device="cuda"), torch.ones(8, device="cuda")
        launches = clock.charged["launches"]
        for rows in (1, 2, 2):
            rms_norm(x[:rows], weight, 1e-5)
        assert clock.charged["compilation"] == 2.0
        assert clock.charged["launches"] - launches == 3 * 0.5
        assert time.perf_counter() == clock.now
        captured(lambda: x + 1)
        assert clock.charged["captures"] == 3.0
        with pytest.raises(Killed):
            for _ in range(100):
                x + 1
    assert time.perf_counter() != clock.now
