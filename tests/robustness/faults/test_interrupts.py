"""An interrupt at any line of a call, and errors in what a user hands over: the engine goes on."""

import random
import signal
import threading
import time
from contextlib import suppress
from functools import cache

import pytest
from faults import OPTIONS, PROMPTS, Interrupted, assert_usable, fresh, times
from helpers.models.scripted import Letters

import csd


@cache
def undisturbed():
    return [out.tokens for out in csd.generate(fresh(), PROMPTS, **OPTIONS)]


@pytest.fixture
def expected():
    return undisturbed()


def usable(e, expected):
    assert_usable(e, PROMPTS[1], expected[1], **OPTIONS)


def collect(e, **more):
    """Assert that samples are kept whenever a call ended."""
    results = csd.generate(e, PROMPTS, **OPTIONS, **more)
    for out, whole in zip(results, undisturbed(), strict=True):
        for sample, tokens in zip(out, whole, strict=True):
            assert sample.tokens == tokens[: len(sample.tokens)]
            assert sample.finish_reason == "cancelled" or sample.tokens == tokens
            for values in (sample.logprobs, sample.raw_logprobs, sample.sources, sample.steps):
                assert len(values) == len(sample.tokens)


def stream(e, **more):
    for _ in csd.stream(e, PROMPTS, **OPTIONS, **more):
        pass


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("call", [collect, stream])
def test_an_interrupt_at_any_line(expected, call, lag):
    e = fresh(lag=lag)
    with Interrupted(-1) as whole:
        call(e)
    rng = random.Random(f"{call.__name__} {lag}")
    hit = set()
    for _ in times(5, 150):
        at = rng.randrange(whole.lines)
        with suppress(KeyboardInterrupt), Interrupted(at) as interrupted:
            call(e)
        hit.add(interrupted.hit)
        usable(e, expected)
    assert len(hit - {""}) > 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_an_interrupt_while_a_call_is_ended(expected, error, monkeypatch):
    """Between an error and the engine's clearing, and within it."""
    from csd.engine import engine as module

    e, clear = fresh(), module.clear
    for place in range(2):
        with monkeypatch.context() as patch:

            def clear_in_part(step, place=place, patch=patch):
                patch.setattr(module, "clear", clear)
                if place:
                    step.slots.live.fill_(False)
                raise error

            patch.setattr(module, "clear", clear_in_part)
            with suppress(error):
                collect(e)
        usable(e, expected)


def test_signals(expected):
    """SIGINT as a terminal sends it, at random moments."""
    e = fresh()
    start = time.perf_counter()
    collect(e)
    longest = time.perf_counter() - start
    rng = random.Random(0)
    for i in times(3, 100):
        call = (collect, stream)[i % 2]
        timer = threading.Timer(rng.random() * longest, signal.raise_signal, [signal.SIGINT])
        with suppress(KeyboardInterrupt):
            timer.start()
            call(e)
            # it may come behind the call
            timer.join()
        with suppress(KeyboardInterrupt):
            timer.join()
        usable(e, expected)


class Fails(Exception):
    pass


class Failing:
    """A function that fails at its `at`-th call."""

    def __init__(self, at, result=None):
        self.at, self.result, self.calls = at, result, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls > self.at:
            raise Fails
        return self.result(*args, **kwargs) if callable(self.result) else self.result


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("what", ["callback", "until", "decode", "encode"])
def test_errors_in_callbacks(expected, what, at):
    e = fresh()
    if what in ("callback", "until"):
        more = {what: Failing(at, False)}
    else:
        tokenizer = Letters()
        if what == "decode":
            tokenizer.decode = Failing(at, tokenizer.decode)
            more = dict(tokenizer=tokenizer)
        else:

            class Raising(Letters):
                __call__ = Failing(at and 1, Letters().__call__)

            more = dict(tokenizer=Raising())
    for call in (collect, stream):
        with pytest.raises(Fails):
            call(e, **more)
        if what == "encode":
            Raising.__call__.calls = 0
        usable(e, expected)


def test_errors_in_a_score(expected):
    e = fresh()
    for _ in range(2):
        out = csd.generate(e, PROMPTS[0], **OPTIONS)
        with pytest.raises(Fails):
            csd.best_of(out, score=Failing(1, 0.5))
        with pytest.raises(Fails):
            csd.vote(out, extract=Failing(1, "7"), limited=True)
        with pytest.raises(Fails):
            csd.generate(e, PROMPTS[0], until=csd.Vote(Failing(1, "7"), limited=True), **OPTIONS)
        usable(e, expected)


def test_a_stream_that_is_left_open(expected):
    """A generator that is dropped without close() cancels its call."""
    e = fresh()
    for _ in range(3):
        events = csd.stream(e, PROMPTS, **OPTIONS)
        next(events)
        del events
        usable(e, expected)
