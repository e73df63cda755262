"""Code that only a GPU runs, with a stand-in that records its calls."""

import gc
import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from helpers.models.scripted import PrefixSum, engine

import csd
from csd.engine.resources import caches as resources
from csd.engine.step import static_step as capture
from csd.engine.step.static_step import Captures
from csd.utils import device
from csd.utils.device import on_device, upload

ASKED = dict(num_samples=2, max_new_tokens=8, seed=1)


@pytest.fixture
def gpu(monkeypatch):
    """torch.cuda as far as capturing needs it."""
    log = []

    @contextmanager
    def within(*what, **options):
        log.append(("graph" if options else "stream", what, options, gc.isenabled()))
        yield

    stream = SimpleNamespace(wait_stream=lambda other: log.append("wait"))
    cuda = SimpleNamespace(
        Stream=lambda: SimpleNamespace(wait_stream=lambda other: None),
        current_stream=lambda: stream,
        stream=within,
        graph=within,
        CUDAGraph=object,
        synchronize=lambda: log.append("synchronize"),
        graph_pool_handle=lambda: object(),
    )
    monkeypatch.setattr(capture, "torch", SimpleNamespace(cuda=cuda, device=torch.device))
    return log


def test_work_is_captured_once_a_key_on_one_stream_and_in_one_memory(gpu):
    captures, ran = Captures(), []

    def work():
        ran.append(gpu[-1][0])
        return len(ran)

    first = captures.get("a", work)
    # twice to warm up, then within the capture, without the collector
    assert ran == ["stream", "stream", "graph"] and first[1] == 3
    assert captures.get("a", work) == first and len(ran) == 3
    captures.get("b", work)
    graphs = [row for row in gpu if row[0] == "graph"]
    assert len(graphs) == 2 and not any(row[3] for row in graphs) and gc.isenabled()
    for name in ("stream", "pool"):
        assert graphs[0][2][name] is graphs[1][2][name] is not None
    assert graphs[0][2]["capture_error_mode"] == "thread_local"


@pytest.mark.parametrize("collecting", [True, False])
def test_a_capture_that_fails_leaves_the_collector_as_it_was(gpu, collecting):
    def fails():
        if gpu[-1][0] == "graph":
            raise RuntimeError("in capture")

    captures = Captures()
    (gc.enable if collecting else gc.disable)()
    try:
        with pytest.raises(RuntimeError, match="in capture"):
            captures.get("a", fails)
        assert gc.isenabled() == collecting and not captures.graphs
    finally:
        gc.enable()


def test_captures_of_two_threads_follow_each_other(gpu):
    """A capture begins with a wait for the device, which would end the other thread's."""
    within, release = threading.Event(), threading.Event()

    def first():
        if gpu[-1][0] == "graph":
            within.set()
            release.wait(30)

    threads = [
        threading.Thread(target=Captures().get, args=("a", work)) for work in (first, lambda: None)
    ]
    threads[0].start()
    assert within.wait(30)
    before = len(gpu)
    threads[1].start()
    threads[1].join(0.3)
    # another engine's capture has not begun: neither its warm-up nor its wait for the device
    assert threads[1].is_alive() and len(gpu) == before
    release.set()
    for thread in threads:
        thread.join(30)
    assert gpu.count("synchronize") == 2


def test_a_capture_that_fails_lets_other_threads_capture(gpu):
    def fails():
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        Captures().get("a", fails)
    thread = threading.Thread(target=Captures().get, args=("a", lambda: None), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def test_the_device_is_current_while_items_are_made(monkeypatch):
    inside = []

    @contextmanager
    def current(where, stream=None):
        inside.append(where)
        yield
        inside.pop()

    monkeypatch.setattr(device, "current", current)
    monkeypatch.setattr(device, "stream_of", lambda where: None)

    def items():
        try:
            for i in range(3):
                assert inside == ["here"]
                yield i
        finally:
            closed.append(list(inside))

    closed = []
    for _ in on_device(items(), "here"):
        assert inside == []
    assert closed == [["here"]]
    stopped = on_device(items(), "here")
    next(stopped)
    stopped.close()
    assert closed == [["here"]] * 2 and inside == []


def test_nothing_is_copied_to_where_it_is():
    x = torch.arange(3)
    assert upload(x, torch.device("cpu")) is x


@pytest.mark.parametrize("static", [False, True])
def test_a_call_in_inference_mode_leaves_a_usable_engine(static):
    with engine(PrefixSum(), static=static) as e:
        with torch.inference_mode():
            first = csd.generate(e, [1, 2, 3], **ASKED)
        again = csd.generate(e, [1, 2, 3], **ASKED)
        assert again.tokens == first.tokens


def test_old_caches_are_gone_before_new_ones_are_sized(monkeypatch):
    with engine(PrefixSum()) as e:
        csd.generate(e, [1, 2, 3], **ASKED)
        old = weakref.ref(e.caches.step.cache)
        fit = resources.slots_that_fit
        seen = []

        def sized(*args):
            seen.append(old())
            return fit(*args)

        monkeypatch.setattr(resources, "slots_that_fit", sized)
        csd.generate(e, [1, 2, 3], **ASKED | {"max_new_tokens": 500})
        assert seen == [None]
