"""`csd.AsyncEngine`: what a request gets depends on it alone, whatever else is in flight."""

import random
import threading
import time

import pytest
import torch
from helpers.models import checkpoints
from helpers.models.scripted import VOCAB, LastToken, Letters, PrefixSum, counting, engine
from helpers.runs.engine_cases import PROMPTS, assert_same_samples, free, plain, prompts
from helpers.targets import few, slow

import csd
from csd.engine.step.step import Step
from csd.serve import Closed
from csd.utils.torch_state import plain_torch

HOW = pytest.mark.parametrize(
    "how", [{}, {"static": True}, {"decoder": "module"}], ids=["eager", "static", "module"]
)


@few(1)
@HOW
def test_samples_are_those_of_generate_whatever_arrives(how):
    """Random arrivals, lengths, parameters and cancellations, from several threads."""
    model = checkpoints.build("llama", dtype=torch.float64)
    generator = random.Random(0)
    asked = []
    for i in range(15):
        prompt = generator.choice([*PROMPTS, [3] * generator.randint(1, 130), [i + 1, 5, 6]])
        asked.append(
            (
                prompt,
                dict(
                    num_samples=generator.randint(1, 4),
                    max_new_tokens=generator.randint(1, 24),
                    seed=generator.randint(0, 3),
                    temperature=generator.choice([0.0, 0.7, 1.3]),
                    top_p=generator.choice([1.0, 0.9]),
                    first_sample=generator.choice([0, 0, 7]),
                    stop_token_ids=[3],
                    top_logprobs=generator.choice([0, 0, 2, 5]),
                    frequency_penalty=generator.choice([0.0, 0.0, 1.2]),
                    logit_bias=generator.choice([{}, {}, {7: 2.0}]),
                    no_repeat_ngram_size=generator.choice([0, 0, 2]),
                ),
            )
        )
    with csd.Engine(model) as plainly:
        wanted = [plainly.generate(prompt, **options) for prompt, options in asked]
    service = csd.AsyncEngine(model, max_slots=6, max_tokens=256, max_queue=100, budget=7, **how)
    assert service.engine.caches.step.static == how.get("static", False)
    handles, twins = [None] * len(asked), []

    def client(numbers):
        own = random.Random(numbers[0])
        for i in numbers:
            prompt, options = asked[i]
            handles[i] = service.submit(prompt, owner=own.choice(["a", "b", None]), **options)
            extra = service.submit(PROMPTS[0], num_samples=3, max_new_tokens=40, seed=i)
            leaves = own.random() < 0.5
            if i % 3 == 0:
                # the same request once more, of the same owner or of another one
                twin = service.submit(prompt, owner="a", stream=own.random() < 0.7, **options)
                twins.append((twin, i, leaves))
            time.sleep(own.random() / 50)
            extra.cancel()
            if i % 3 == 0 and leaves:
                twin.cancel()

    threads = [threading.Thread(target=client, args=(range(5 * k, 5 * k + 5),)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same_samples([h.result(60) for h in handles], wanted)
    for twin, i, cancelled in twins:
        for sample, want in zip(twin.result(60), wanted[i], strict=True):
            assert cancelled or sample.finish_reason == want.finish_reason
            assert sample.tokens == want.tokens[: len(sample.tokens)]
    for handle, want in zip(handles, wanted, strict=True):
        got = handle.result()
        for a, b in zip(got, want, strict=True):
            assert a.raw_logprobs == pytest.approx(b.raw_logprobs, abs=1e-9)
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-9)
            ids = [[[token for token, _ in row] for row in x.top_logprobs] for x in (a, b)]
            assert ids[0] == ids[1]
    assert free(service)


def test_a_full_queue_refuses_and_a_closed_engine_too():
    service = csd.AsyncEngine(engine(PrefixSum(), max_slots=1), max_tokens=2000, max_queue=2)
    handles = [service.submit([1, 2], max_new_tokens=1500, seed=1)]
    with pytest.raises(csd.QueueFull, match="max_queue=2"):
        for _ in range(4):
            handles.append(service.submit([1, 2], max_new_tokens=5, seed=1))
    handles[0].cancel()
    assert all(len(h.result(60).tokens[0]) == 5 for h in handles[1:])
    service.submit([5], max_new_tokens=3, seed=1).result(60)
    assert free(service)
    with pytest.raises(Closed):
        service.submit([1], max_new_tokens=1)


def test_closing_drains_or_ends_what_is_in_flight():
    for drain, reason in ((True, "length"), (False, "cancelled")):
        service = csd.AsyncEngine(engine(PrefixSum(), max_slots=1), max_tokens=2000)
        asked = dict(max_new_tokens=150, detached=True)
        handles = [service.submit([1, 2], seed=s, **asked) for s in range(3)]
        next(iter(handles[0]))
        service.close(drain=drain)
        reasons = [h.result(1).finish_reasons for h in handles]
        assert reasons[1:] == [[reason]] * 2
        assert free(service)


def test_closing_ends_what_no_step_has_been_run_for():
    """A request that is accepted, and one that is refused right behind it."""
    service = csd.AsyncEngine(engine(PrefixSum()), max_tokens=200)
    # its thread sees nothing before both
    with service._inbox._changed, pytest.raises(ValueError, match="top_k"), service:
        service.close = lambda drain, timeout=0: csd.AsyncEngine.close(service, drain, timeout)
        handle = service.submit([1, 2], max_new_tokens=50, seed=1)
        service.submit([1, 2], top_k=-1)
    assert handle.result(10).finish_reasons == ["cancelled"]
    service._thread.join(10)
    assert not service._thread.is_alive()


def test_errors_end_their_request_alone():
    def logits_of(token, position):
        logits = torch.zeros(token.shape[0], VOCAB, dtype=torch.float64)
        logits[:, 30] = -100.0
        logits[token == 30] = float("nan")
        return logits

    service = csd.AsyncEngine(engine(LastToken(logits_of), tokenizer=Letters(), max_slots=4))
    good = service.submit([1], num_samples=2, max_new_tokens=200, seed=1)

    def until(samples):
        raise RuntimeError("mine")

    bad = service.submit([2, 30], max_new_tokens=5, seed=1)
    broken = service.submit([1], num_samples=2, max_new_tokens=5, seed=1, until=until)
    empty = service.submit([1], max_new_tokens=5, seed=1, allowed_token_ids=[3], bad_words=[[3]])
    for handle, kind, text in (
        (bad, FloatingPointError, "NaN"),
        (broken, RuntimeError, "mine"),
        (empty, ValueError, "bad_words"),
    ):
        with pytest.raises(kind, match=text) as caught:
            handle.result(60)
        assert isinstance(caught.value.samples, csd.Samples)
    for options, text in (
        (dict(temperature=-1), "temperature"),
        (dict(max_new_tokens=10**6), "context"),
        (dict(budget=3), "budget"),
        (dict(callback=print), "callback"),
        (dict(logits_processor=lambda ids, x: x), "logits_processor"),
    ):
        with pytest.raises(ValueError, match=text):
            service.submit([1], **options)
    assert good.result(60).finish_reasons == ["length"] * 2
    assert service.counters.failed == 3
    assert free(service)


def test_cancelled_samples_do_not_delay_other_requests(monkeypatch):
    """A cancelled request switches torch's state no more often than one of a single sample.

    Timing the steps may switch it too, at most a few times in a call.
    """
    entered = []
    enter = plain_torch.__enter__
    monkeypatch.setattr(plain_torch, "__enter__", lambda c: (entered.append(c), enter(c))[1])
    counts = []
    with csd.AsyncEngine(engine(PrefixSum(), max_slots=4), max_tokens=2000) as service:
        for samples in (1, 200):
            before = len(entered)
            handle = service.submit([1, 2], num_samples=samples, max_new_tokens=1000, seed=1)
            next(iter(handle))
            handle.cancel()
            assert handle.result(60).finish_reasons == ["cancelled"] * samples
            while service._requests is not None:
                time.sleep(0.001)
            counts.append(len(entered) - before)
    assert counts[1] < counts[0] + 20, counts


def test_until_is_a_requests_own():
    with csd.AsyncEngine(engine(counting(end=20), max_slots=4), max_tokens=300) as service:
        mine = service.submit(
            [1], num_samples=6, max_new_tokens=30, seed=1, until=lambda s: len(s) >= 2
        )
        other = service.submit([2], num_samples=3, max_new_tokens=30, seed=1)
        assert mine.result(60).finish_reasons == ["length"] * 2 + ["cancelled"] * 4
        assert other.result(60).finish_reasons == ["length"] * 3


@slow
def test_requests_wait_for_pages(monkeypatch):
    """Memory holds one prompt with two samples; more samples and prompts come when some end."""
    from csd.engine.resources import caches as room

    model = PrefixSum(sharpness=4.0)
    e = engine(model, max_slots=8)
    monkeypatch.setattr(room.Room, "bytes", lambda self, *_: self.pages)
    monkeypatch.setattr(room, "changed_bytes", lambda *_: 0)
    monkeypatch.setattr(room, "free_bytes", lambda _: 9)
    e.caches.memory = 1.0
    service = csd.AsyncEngine(e)
    assert service.longest == 8 * 64
    asked = [p[:200] for p in prompts(6, 200)]
    handles = [service.submit(p, num_samples=4, max_new_tokens=120, seed=3) for p in asked]
    for prompt, handle in zip(asked, handles, strict=True):
        want = [plain(model, prompt, 3, i, 120) for i in range(4)]
        assert handle.result(60).tokens == want
    with pytest.raises(ValueError, match="context of 512"):
        service.submit([1] * 500, max_new_tokens=100)
    assert free(service)


def test_too_little_memory_is_an_error_at_the_start():
    e = engine(PrefixSum(), memory=1e-9)
    with pytest.raises(MemoryError, match="lower max_slots"):
        csd.AsyncEngine(e)


def test_likeliest_tokens_are_the_models_own():
    model = PrefixSum(sharpness=2.0)
    with csd.AsyncEngine(engine(model, max_slots=3), max_tokens=200, budget=5) as service:
        prompt = [4, 9, 2]
        without = service.submit(prompt, max_new_tokens=30, seed=2)
        handle = service.submit(
            prompt,
            num_samples=2,
            max_new_tokens=30,
            seed=2,
            temperature=0.5,
            top_k=3,
            top_logprobs=4,
            score_prompt=2,
        )
        for sample in handle.result(60):
            for i, (token, raw) in enumerate(zip(sample.tokens, sample.raw_logprobs, strict=True)):
                want = model.next_logits(prompt + sample.tokens[:i]).log_softmax(-1)
                ids, logprobs = zip(*sample.top_logprobs[i], strict=True)
                assert list(ids) == want.topk(4).indices.tolist()
                assert list(logprobs) == pytest.approx(want.topk(4).values.tolist())
                assert raw == pytest.approx(float(want[token]))
        distributions = [model.next_logits(prompt[:i]).log_softmax(-1) for i in (1, 2)]
        want = [float(distributions[0][9]), float(distributions[1][2])]
        assert handle.scores.logprobs == pytest.approx(want)
        assert [len(row) for row in handle.scores.top] == [2, 2]
        assert not without.result(60)[0].top_logprobs


def test_a_requests_seed_is_drawn_and_known():
    with csd.AsyncEngine(engine(PrefixSum()), max_tokens=200) as service:
        torch.manual_seed(3)
        first = service.submit([1, 2], max_new_tokens=20)
        again = service.submit([1, 2], max_new_tokens=20, seed=first.seed)
        assert first.result(60).tokens == again.result(60).tokens
        assert service.submit([1, 2], max_new_tokens=20).seed != first.seed


def test_history_drafts():
    with csd.AsyncEngine(engine(PrefixSum()), max_tokens=300, budget=8) as service:
        first = service.submit([1, 2], max_new_tokens=60, seed=5).result(60)
        again = service.submit([1, 2], max_new_tokens=60, seed=5, history=[first[0]]).result(60)
        assert again.tokens == first.tokens
        assert again.stats.accepted["history"] > 0
        assert again.stats.sample_steps < first.stats.sample_steps


def test_generate_runs_while_nothing_is_in_flight():
    model = PrefixSum(sharpness=3.0)
    e = engine(model, max_slots=4)
    with csd.AsyncEngine(e, max_tokens=300) as service:
        for seed in range(3):
            handle = service.submit([1, 2], max_new_tokens=30, seed=seed)
            out = e.generate([3, 4, 5], num_samples=2, max_new_tokens=40, seed=seed)
            assert out.tokens == [plain(model, [3, 4, 5], seed, i, 40) for i in range(2)]
            assert handle.result(60).tokens[0] == plain(model, [1, 2], seed, 0, 30)


def test_an_error_of_the_engine_ends_what_is_in_flight_and_no_more(monkeypatch):
    service = csd.AsyncEngine(engine(PrefixSum(), max_slots=2), max_tokens=300)
    before, failing = Step.forward, threading.Event()

    def forward(self, pool):
        if failing.is_set():
            failing.clear()
            raise RuntimeError("the device has gone")
        return before(self, pool)

    monkeypatch.setattr(Step, "forward", forward)
    failing.set()
    handle = service.submit([1, 2], max_new_tokens=20, seed=1)
    with pytest.raises(RuntimeError, match="the device has gone"):
        handle.result(60)
    assert len(service.submit([1, 2], max_new_tokens=20, seed=1).result(60).tokens[0]) == 20
    assert free(service)
