"""Engines on a GPU (`make test-gpu`); elsewhere on a simulated one, of one thread and device.

Draws are compared with the CPU's references.
"""

import threading
from functools import partial

import pytest
import torch
from helpers.chosen_device import ON_GPU
from helpers.runs import simulated_calls
from helpers.runs.engine_cases import PROMPTS, assert_same_samples
from helpers.targets import few
from simulated_gpu import Gpu

import csd
from csd.engine.step import static_step
from csd.graph import consensus
from csd.state.context_table import GraphConfig

pytestmark = [pytest.mark.compiled, pytest.mark.stand_in]

ASKED = dict(num_samples=3, max_new_tokens=12, seed=1, temperature=0.8, top_p=0.9)
# more samples than slots, a prompt of many chunks and pages, every rule of sampling and stopping
MANY = dict(
    prompt=[[5, 6, 7, 5, 6, 7, 5], [i % 90 for i in range(150)], [9, 8, 9]],
    num_samples=5,
    max_new_tokens=10,
    seed=3,
    temperature=1.0,
    top_k=30,
    min_p=0.01,
    repetition_penalty=1.2,
    stop_token_ids=[3, 17, 40, 41, 42],
    min_new_tokens=3,
    budget=12,
)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Within a test, a GPU: the machine's, or a simulated one."""
    if ON_GPU:
        yield
        return
    monkeypatch.setattr(static_step, "SIZES", (16, 32))
    # the references copy the whole graph
    monkeypatch.setattr(consensus, "GraphConfig", partial(GraphConfig, capacity=1 << 10))
    with Gpu():
        yield


engine = partial(simulated_calls.engine, "cuda")


def on_cpu(dtype=torch.float32, how=None, **asked):
    how = dict(kernels="reference") | (how or {})
    with simulated_calls.engine("cpu", dtype, **how) as e:
        return e.generate(**asked)


@few(1)
@pytest.mark.parametrize(
    ("dtype", "how"),
    [
        (torch.float32, dict(static=True)),
        (torch.float32, dict(static=False)),
        # kernels multiply in float32
        (torch.float64, dict(kernels="reference")),
    ],
    ids=["captured", "eager", "float64"],
)
def test_drafts_are_lossless(dtype, how):
    asked = ASKED | dict(max_new_tokens=6)
    want = on_cpu(dtype, prompt=PROMPTS, speculate=False, **asked)
    with engine(dtype=dtype, **how) as e:
        for options in (dict(speculate=False), dict(budget=10)):
            assert_same_samples(e.generate(PROMPTS, **options, **asked), want)


def test_graphs_are_captured_once_and_no_later_call_waits():
    want = on_cpu(prompt=PROMPTS, budget=10, **ASKED)
    with engine() as e:
        assert_same_samples(e.generate(PROMPTS, budget=10, **ASKED), want)
        captured = dict(e.captured)
        assert captured
        torch.cuda.set_sync_debug_mode("error")
        try:
            assert_same_samples(e.generate(PROMPTS, budget=10, **ASKED), want)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert e.captured == captured


@few(1)
@pytest.mark.parametrize("lag", [1, 4])
def test_slots_are_refilled(lag):
    how = dict(prefill_chunk=64)
    want = on_cpu(how=how, **MANY)
    with engine(lag=lag, **how) as e:
        assert_same_samples(e.generate(**MANY), want)


def test_a_call_closed_midway_leaves_the_engine_usable():
    want = on_cpu(prompt=PROMPTS, budget=10, **ASKED)
    with engine() as e:
        stream = csd.stream(e, PROMPTS, budget=10, **ASKED)
        next(stream)
        stream.close()
        assert_same_samples(e.generate(PROMPTS, budget=10, **ASKED), want)


@pytest.mark.skipif(not ON_GPU, reason="the simulated GPU has one thread: make test-gpu")
@pytest.mark.parametrize("shared", [True, False], ids=["one engine", "an engine each"])
def test_two_threads(shared):
    """Captures and replays of one thread, while the other captures and replays."""
    want = on_cpu(prompt=PROMPTS, budget=10, **ASKED)
    first = engine()
    engines = [first, first if shared else engine()]
    found: dict = {}

    def draw(i):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                found[i] = [engines[i].generate(PROMPTS, budget=10, **ASKED) for _ in range(3)]
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=draw, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert isinstance(found[i], list), found[i]
        for got in found[i]:
            assert_same_samples(got, want)


@pytest.mark.skipif(not ON_GPU or torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_a_device_that_is_not_the_current_one():
    want = on_cpu(prompt=PROMPTS, budget=10, **ASKED)
    with simulated_calls.engine("cuda:1") as e:
        assert_same_samples(e.generate(PROMPTS, budget=10, **ASKED), want)
        assert e.captured
    assert torch.cuda.current_device() == 0


def test_what_samples_are_asked_for_is_captured():
    """All that is a table: a captured step holds it, and the host waits for none of it."""
    asked = ASKED | dict(
        logit_bias={5: 1.5},
        bad_words=[[6], [7, 5]],
        suppress_tokens=[9],
        frequency_penalty=0.3,
        presence_penalty=0.2,
        no_repeat_ngram_size=2,
        repetition_penalty=1.1,
        min_new_tokens=2,
        max_thinking_tokens=3,
        thinking_tags=[[5], [11, 12]],
        top_logprobs=2,
        entropy=True,
        max_new_tokens=6,
        budget=10,
    )
    want = on_cpu(prompt=PROMPTS, **asked)
    with engine() as e:
        free = e.generate(PROMPTS, budget=10, **ASKED)
        out = e.generate(PROMPTS, **asked)
        captured = dict(e.captured)
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = e.generate(PROMPTS, **asked)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert e.captured == captured
        # and calls without options replay what they had
        assert_same_samples(e.generate(PROMPTS, budget=10, **ASKED), free)
        assert e.captured == captured
    for got in (out, again):
        assert_same_samples(got, want)
        for a, b in zip(got, want, strict=True):
            assert a[0].forced == b[0].forced
            assert [[t for t, _ in p] for p in a[0].top_logprobs] == [
                [t for t, _ in p] for p in b[0].top_logprobs
            ]
            assert a[0].entropies == pytest.approx(b[0].entropies, abs=1e-4)
