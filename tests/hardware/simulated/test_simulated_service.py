"""An `AsyncEngine` on a GPU that is not there: captured steps, a step's lag, and no wait."""

import threading

import pytest
from helpers.runs.engine_cases import PROMPTS, assert_same_samples
from helpers.runs.simulated_calls import engine
from simulated_gpu import Gpu

import csd
from csd.engine.step import static_step
from csd.serve import async_engine

pytestmark = pytest.mark.stand_in

ASKED = dict(num_samples=2, max_new_tokens=8, temperature=0.8, top_p=0.9)


@pytest.fixture
def in_this_thread(monkeypatch):
    """The simulation is of one thread, which calls `_draw` in place of the engine's own."""
    monkeypatch.setattr(static_step, "SIZES", (16, 32))
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    yield
    for service in [*async_engine._open]:
        async_engine._open.discard(service)


def test_requests_that_arrive_and_leave_between_replays(in_this_thread):
    """Some come while others are drawn, one of them to a group, and one leaves."""
    with engine("cpu") as e:
        want = [
            e.generate(PROMPTS[0], budget=10, seed=1, **ASKED),
            e.generate(PROMPTS[1], budget=10, seed=2, **ASKED),
            e.generate(PROMPTS[0], budget=10, seed=3, **ASKED),
        ]
    with Gpu() as gpu, engine("cuda") as e:
        service = csd.AsyncEngine(e, max_tokens=128, budget=10)
        assert e.static and e.lag == 1
        for _ in range(2):
            first = service.submit(PROMPTS[0], owner="a", seed=1, **ASKED)
            left = service.submit(PROMPTS[1], seed=5, **ASKED | dict(max_new_tokens=90))
            later, before = [], first._handle.push

            def push(*news, later=later, before=before, left=left):
                before(*news)
                if not later:
                    later.append(service.submit(PROMPTS[1], seed=2, **ASKED))
                    later.append(service.submit(PROMPTS[0], owner="a", seed=3, **ASKED))
                    left.cancel()

            first._handle.push = push
            replays = gpu.replays
            gpu.waits.clear()
            service._draw()
            got = [handle.result(0) for handle in (first, *later)]
            assert_same_samples(got, want)
            assert gpu.replays > replays
            assert "cancelled" in left.result(0).finish_reasons
        # all graphs are there: nothing is captured and nothing is waited for
        assert not gpu.waits
        cache = e.caches.step.cache
        assert len(cache.allocator) == cache.k.shape[1]
