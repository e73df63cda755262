"""CUDA's path on a GPU that is not there (`tools/simulated_gpu`)."""

import random
from collections import defaultdict
from functools import partial
from unittest import mock

import pytest
import torch
from helpers.models import eagle_heads
from helpers.runs.engine_cases import PROMPTS, assert_same_samples
from helpers.runs.simulated_calls import engine
from helpers.targets import few, slow
from simulated_gpu import Gpu

import csd
from bench.lib.shapes import random_model
from csd.engine.options.params import SamplingParams
from csd.engine.requests.request import Request
from csd.engine.step import static_step
from csd.engine.step.budget import Budget
from csd.engine.step.static_step import CAPTURING, Captures
from csd.graph import consensus
from csd.research.draft_models.eagle import read_head
from csd.state.context_table import GraphConfig

pytestmark = pytest.mark.stand_in

ASKED = dict(num_samples=3, max_new_tokens=20, seed=1, temperature=0.8, top_p=0.9)
# more samples than slots, a prompt of many chunks, every rule of sampling and stopping
MANY = dict(
    prompt=[[5, 6, 7, 5, 6, 7, 5], [i % 90 for i in range(150)], [9, 8, 9]],
    num_samples=5,
    max_new_tokens=14,
    seed=3,
    temperature=1.0,
    top_k=30,
    min_p=0.01,
    repetition_penalty=1.2,
    stop_token_ids=[3, 17, 40, 41, 42],
    min_new_tokens=3,
)


def generate(device, how=None, **asked):
    with engine(device, **(how or {})) as e:
        return e.generate(**asked)


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch):
    monkeypatch.setattr(static_step, "SIZES", (16, 32))


@pytest.fixture
def captures(monkeypatch):
    """A list that grows with each graph that is captured."""
    found, capture = [], Captures._capture

    def noted(self, run):
        found.append(capture(self, run))
        return found[-1]

    monkeypatch.setattr(Captures, "_capture", noted)
    return found


@pytest.fixture(scope="module")
def plain():
    return generate("cpu", prompt=PROMPTS, budget=10, **ASKED)


@few(1)
@pytest.mark.parametrize("budget", [0, 10, "auto"])
def test_static_steps_are_captured_and_replayed(plain, budget):
    with Gpu() as gpu, engine("cuda") as e:
        assert e.static and e.lag == 1
        assert_same_samples(e.generate(PROMPTS, budget=budget, **ASKED), plain)
        first, events = gpu.replays, gpu.events
        gpu.waits.clear()
        assert_same_samples(e.generate(PROMPTS, budget=budget, **ASKED), plain)
        assert gpu.replays - first >= gpu.events - events > 0
        assert not gpu.waits


@few(1)
@pytest.mark.parametrize(("prefill_chunk", "lag"), [(16, 1), (512, 0), (16, 4)])
def test_slots_are_refilled_and_prompts_read_without_a_wait(prefill_chunk, lag):
    how = dict(prefill_chunk=prefill_chunk)
    want = generate("cpu", how, budget=12, **MANY)
    with Gpu() as gpu, engine("cuda", lag=lag, **how) as e:
        gpu.waits.clear()
        assert_same_samples(e.generate(budget=12, **MANY), want)
        assert not gpu.waits


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_steps_of_any_shape(kernels, monkeypatch):
    asked = dict(prompt=PROMPTS, budget=10, **ASKED | dict(max_new_tokens=8))
    want = generate("cpu", **asked)
    # the references copy the whole graph
    monkeypatch.setattr(consensus, "GraphConfig", partial(GraphConfig, capacity=1 << 10))
    with Gpu():
        assert_same_samples(generate("cuda", dict(kernels=kernels, static=False), **asked), want)


@pytest.mark.parametrize("seed", range(3))
def test_steps_of_any_shape_with_mixed_budgets(seed, monkeypatch):
    """Inserts of steps without drafts wait for the next step that drafts."""
    asked = ASKED | dict(prompt=PROMPTS, num_samples=4, max_new_tokens=16)
    monkeypatch.setattr(consensus, "GraphConfig", partial(GraphConfig, capacity=1 << 10))
    numbers = []

    def mixed(budget, live_count):
        numbers.append(draw.choice((0, 0, 3, 12)))
        return numbers[-1]

    monkeypatch.setattr(Budget, "num_draft_tokens", mixed)
    draw = random.Random(seed)
    want = generate("cpu", dict(kernels="reference"), budget=12, **asked)
    draw = random.Random(seed)
    with Gpu():
        got = generate("cuda", dict(static=False, lag=0), budget=12, **asked)
    assert_same_samples(got, want)
    assert 0 in numbers and {3, 12} & {*numbers}


def test_steps_are_timed_without_waiting_for_the_device():
    """A wait for all of it would end the capture of another thread."""
    alone = []
    with Gpu() as gpu:
        waits = gpu.synchronize

        def wait():
            alone.append(CAPTURING._is_owned())
            waits()

        with mock.patch.object(torch.cuda, "synchronize", wait), engine("cuda") as e:
            e.generate(PROMPTS, budget="auto", **ASKED)
            captures = len(alone)
            e.step_times.measure()
    # captures wait, one after another
    assert len(alone) == captures > 0 and all(alone)


@slow
def test_a_drafter_on_the_host(plain):
    with Gpu():
        out = generate("cuda", prompt=PROMPTS, drafter="prompt-lookup", budget=10, **ASKED)
        assert_same_samples(out, plain)


@few(1)
@pytest.mark.parametrize("budget", [10, "auto"])
def test_a_draft_model_alone_is_captured(plain, budget):
    """Prompts are read and samples refilled without a wait, as with the graph."""
    with Gpu() as gpu, engine("cuda") as e:
        small = random_model("tiny", "cuda", torch.float32, seed=1)
        drafter = csd.DraftModel(small, layers=1, k=2, depth=3)
        for waits in (True, False):
            replays = gpu.replays
            gpu.waits.clear()
            out = e.generate(PROMPTS, drafter=drafter, budget=budget, **ASKED)
            assert_same_samples(out, plain)
            # the first call compiles, and makes the cache
            assert waits or not gpu.waits
            assert e.captured and gpu.replays > replays
            if budget == 10:
                assert sum(r.stats.nodes_proposed for r in out) > 0


@slow
def test_a_head_alone_is_captured(plain, tmp_path):
    config = random_model("tiny", "cpu", torch.float32).config
    eagle_heads.write(tmp_path, 1, config.hidden, config.vocab)
    # transformers is imported before torch is replaced
    read_head(tmp_path)
    with Gpu() as gpu, engine("cuda") as e:
        drafter = csd.Eagle(tmp_path, k=2, depth=3, dtype=torch.float32)
        for waits in (True, False):
            replays = gpu.replays
            gpu.waits.clear()
            out = e.generate(PROMPTS, drafter=drafter, budget=10, **ASKED)
            assert_same_samples(out, plain)
            assert waits or not gpu.waits
            assert e.captured and gpu.replays > replays
            assert sum(r.stats.nodes_proposed for r in out) > 0


@slow
def test_a_draft_model_beside_the_graph_runs_eagerly(plain):
    with Gpu(), engine("cuda") as e:
        small = random_model("tiny", "cuda", torch.float32, seed=1)
        drafter = csd.DraftModel(small, layers=1, k=2, depth=3, graph=True)
        out = e.generate(PROMPTS, drafter=drafter, budget=10, **ASKED)
        assert_same_samples(out, plain)
        assert not e.captured


def test_verifiers_that_draw_are_refused():
    with Gpu(), pytest.raises(NotImplementedError, match="CPU only"):
        generate("cuda", prompt=PROMPTS, verifier="kseq", **ASKED)


def test_what_a_call_is_asked_to_keep():
    asked = dict(prompt=PROMPTS, budget=10, **ASKED)
    heard = defaultdict(list)

    def note(p, i, tokens, text):
        heard[p, i] += tokens

    more = dict(callback=note, until=lambda samples: len(samples) > 1)
    want = generate("cpu", dict(static=True), **asked, **more)
    heard.clear()
    with Gpu() as gpu, engine("cuda") as e:
        gpu.waits.clear()
        got = e.generate(**asked, **more)
        assert_same_samples(got, want)
        assert got[0].stats.peak_memory > 0
        for p, out in enumerate(got):
            for sample in out:
                if sample.finish_reason != "cancelled":
                    assert heard[p, sample.index] == sample.tokens
        # an end that the caller makes
        stream = csd.stream(e, **asked)
        next(stream)
        stream.close()
        assert_same_samples(e.generate(**asked), generate("cpu", **asked))
        assert not gpu.waits


def test_calls_on_other_streams_follow_each_other(plain):
    with Gpu(), engine("cuda") as e:
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        stream = csd.stream(e, PROMPTS, budget=10, **ASKED)
        with torch.cuda.stream(first):
            next(stream)
        # a caller may be elsewhere when it asks for more
        with torch.cuda.stream(second):
            assert len(list(stream)) == 5
            assert_same_samples(e.generate(PROMPTS, budget=10, **ASKED), plain)
        assert_same_samples(e.generate(PROMPTS, budget=10, **ASKED), plain)


def test_memory_is_given_back():
    with Gpu() as gpu:
        e = engine("cuda")
        before = gpu.memory.allocated()
        e.generate(PROMPTS, budget=4, **ASKED)
        assert gpu.memory.allocated() > before
        assert not gpu.launched["empty_cache"]
        e.release()
        # to other processes too
        assert gpu.memory.allocated() == before and gpu.launched["empty_cache"] == 1
        small = engine("cuda", memory=0.001)
        gpu.memory.total = 1 << 30
        with pytest.raises(MemoryError, match=r"in flight .* need"):
            small.generate(PROMPTS, **ASKED | {"max_new_tokens": 900})


def test_graphs_that_were_measured_are_replayed_by_the_call(plain, captures):
    """None is captured for its time alone, nor again by a call behind it."""
    with Gpu() as gpu, engine("cuda") as e:
        assert_same_samples(e.generate(PROMPTS, budget="auto", **ASKED), plain)
        assert {key[:2] for key in e.captured} >= {(16, 0), (32, 0)}
        assert len(captures) == len(e.captured)
        kept = len(captures)
        gpu.waits.clear()
        assert_same_samples(e.generate(PROMPTS, budget=0, **ASKED), plain)
        assert len(captures) == kept or (16, 0) not in {key[:2] for key in e.captured}


def test_a_warm_engine_captures_nothing(plain, captures):
    with Gpu() as gpu, engine("cuda") as e:
        e.warmup(num_samples=3, prompt_tokens=40, max_new_tokens=20)
        assert {key[:2] for key in e.captured} == {(16, 0), (16, 16), (32, 0), (32, 32)}
        kept = len(captures)
        gpu.waits.clear()
        out = e.generate(PROMPTS[0], budget="auto", **ASKED)
        assert_same_samples([out], plain[:1])
        assert len(captures) == kept and not gpu.waits


def test_mixed_calls_keep_their_graphs(monkeypatch, captures):
    """Caches are made at most three times after the tenth call, and all graphs with them."""
    draw = random.Random(0)
    with Gpu(), engine("cuda", max_slots=16) as e:
        made, plainly = [], e.caches.allocate
        monkeypatch.setattr(
            e.caches, "allocate", lambda *a, **more: (made.append(a), plainly(*a, **more))[1]
        )
        counts = []
        for _ in range(200):
            n, new = draw.choice((2, 4, 8)), draw.choice((64, 128, 256))
            params = SamplingParams(max_new_tokens=new)
            prompt = [1] * draw.randrange(60, 700)
            e.caches.prepare([Request.of(0, prompt, params, range(n), 0)], "consensus")
            counts.append(len(made))
        assert counts[-1] - counts[9] <= 3
        step = e.caches.step
        e.generate([5, 6, 7], budget=8, num_samples=2, max_new_tokens=8, seed=1)
        kept = len(captures)
        assert kept and len(step.captures.graphs) == kept
        e.generate([5, 6, 7] * 100, budget=8, num_samples=8, max_new_tokens=200, seed=1)
        assert e.caches.step is step and len(captures) == kept
