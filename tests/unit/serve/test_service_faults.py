"""`csd.AsyncEngine`: whatever fails for one request ends that request alone."""

import asyncio
from functools import cache

import pytest
from helpers.models.scripted import PrefixSum, engine
from helpers.oracles.grammar_oracle import Pieces
from helpers.runs.engine_cases import free

import csd
from csd.engine.requests.request import LiveSample
from csd.engine.rules.changes import Changes
from csd.engine.rules.grammar import Grammars
from csd.engine.slots import HostSlots
from csd.engine.step.prefill import Prefill
from csd.serve import Closed
from csd.state.kv_cache import KVCache

# prompt of the requests that fail
BAD = [9, 8, 7, 6, 5]
OPTIONS = [
    dict(num_samples=3, max_new_tokens=30, seed=1),
    dict(num_samples=2, max_new_tokens=35, seed=2, bad_words=[[3, 4], [5, 6, 7]]),
    dict(num_samples=2, max_new_tokens=25, seed=3, logit_bias={4: 1.0}),
]
PROMPTS = [[1, 2], [3, 4, 5, 3], [6, 2]]


class Panic(BaseException):
    """An error as libraries of tokenizers and grammars raise it."""


def of_bad(request):
    return request.prompt == BAD


def last_is_bad(cls, requests, *_):
    return bool(requests) and of_bad(requests[-1])


# function, the calls that fail, and whether they fail after they have run
FAULTS = {
    "admission": (HostSlots, "_admit", lambda slots, request: of_bad(request), False),
    "rules": (Changes, "of_call", last_is_bad, False),
    "written rules": (Changes, "of_call", last_is_bad, True),
    "group": (Prefill, "begin", lambda cls, step, request, *_: of_bad(request), False),
    "begun group": (Prefill, "begin", lambda cls, step, request, *_: of_bad(request), True),
    "pages": (KVCache, "take", lambda c, table, row, tokens, *_: tokens == len(BAD) - 1, False),
    "prompt": (Prefill, "finish_chunk", lambda prefill, _: of_bad(prefill.request), True),
    "history": (Prefill, "enter_history", lambda prefill: of_bad(prefill.request), False),
    "sample": (LiveSample, "__init__", lambda _, r, i, *args: of_bad(r) and i == 2, False),
    "tokens": (LiveSample, "append", lambda live, *_: of_bad(live.request), True),
    "matcher": (Grammars, "begin", lambda _, refill: of_bad(refill.request), False),
    "second matcher": (
        Grammars,
        "begin",
        lambda _, refill: of_bad(refill.request) and refill.index == 1,
        False,
    ),
    "grammar": (Grammars, "_at", lambda g, s, *_: of_bad(g._requests[s]), True),
}


def let_fail(monkeypatch, owner, name, fails, after):
    """Let calls for which `fails` is true raise MemoryError and Panic in turn; returns these."""
    plain, raised = vars(owner)[name], []
    call = plain.__func__ if isinstance(plain, classmethod) else plain

    def patched(*args, **kwargs):
        if not fails(*args):
            return call(*args, **kwargs)
        if after:
            call(*args, **kwargs)
        raised.append((Panic if len(raised) % 2 else MemoryError)("too much"))
        raise raised[-1]

    monkeypatch.setattr(owner, name, classmethod(patched) if call is not plain else patched)
    return raised


@cache
def drawn(grammar):
    """A model; prompts, options and samples of requests beside which others fail."""
    options, prompts = [*OPTIONS], [*PROMPTS]
    if grammar:
        options.append(dict(num_samples=2, max_new_tokens=30, seed=3, regex="[a-z]+"))
        prompts.append([2, 3])
    model = PrefixSum(sharpness=3.0)
    with engine(model, tokenizer=Pieces()) as plain:
        wanted = [plain.generate(p, **o) for p, o in zip(prompts, options, strict=True)]
    return model, prompts, options, wanted


@pytest.mark.parametrize("kind", FAULTS)
def test_a_failing_request_ends_alone(monkeypatch, kind):
    bad = dict(num_samples=4, max_new_tokens=20, seed=5, suppress_tokens=[1])
    grammar = kind in ("matcher", "second matcher", "grammar")
    if grammar:
        pytest.importorskip("llguidance")
        bad |= dict(regex="[a-f]+")
    model, prompts, options, wanted = drawn(grammar)
    e = engine(model, tokenizer=Pieces(), max_slots=6)
    service = csd.AsyncEngine(e, max_tokens=256, budget=6)
    raised = let_fail(monkeypatch, *FAULTS[kind])
    for others in range(2):
        handles = []
        for prompt, o in zip(prompts, options, strict=True):
            handles.append(service.submit(prompt, **o))
            handles.append(service.submit(BAD, **bad, top_p=0.9 + others / 100))
        for bad_handle in handles[1::2]:
            with pytest.raises((MemoryError, Panic), match="too much"):
                bad_handle.result(60)
        for handle, want in zip(handles[::2], wanted, strict=True):
            got = handle.result(60)
            assert got.tokens == want.tokens
            assert got.logprobs == want.logprobs
    assert len(raised) >= len(handles)
    assert service.counters.failed == len(handles)
    assert free(service)


def test_a_dead_thread_refuses_requests_and_ends_those_it_had(monkeypatch):
    service = csd.AsyncEngine(engine(PrefixSum(), max_slots=1), max_tokens=300)

    def dead(*_):
        raise Panic("the thread")

    monkeypatch.setattr(service, "_draw", dead)
    with service._inbox._changed:
        handles = [service.submit([1, 2], max_new_tokens=5, seed=1) for _ in range(3)]
    for handle in handles:
        with pytest.raises(RuntimeError, match="the thread"):
            handle.result(60)
    for call in (
        lambda: service.submit([1, 2], max_new_tokens=5),
        lambda: service.update(lambda e: e),
    ):
        with pytest.raises(Closed, match="the engine's thread has ended"):
            call()
    assert service.closed and service.waiting == 0
    service.close()


class Unpassable(Exception):
    """An error in which no attribute can be set, and whose text cannot be read."""

    def __setattr__(self, *_):
        raise AttributeError("frozen")

    def __str__(self):
        raise SystemExit


class Doubtful:
    """An answer of `until` that is neither true nor false."""

    def __init__(self, error):
        self.error = error

    def __bool__(self):
        raise self.error


# errors that the frames between a function and its caller would take for their own end
SIGNALS = (
    GeneratorExit,
    KeyboardInterrupt,
    SystemExit,
    asyncio.CancelledError,
    StopIteration,
    StopAsyncIteration,
)
RAISED = (*SIGNALS, Panic, OSError, Unpassable)


def read_result(reader):
    return reader.result(60)


def read_pieces(reader):
    return [*reader]


def read_async(reader):
    async def other():
        for _ in range(20):
            await asyncio.sleep(0.001)
        return "whole"

    async def both():
        of_other = asyncio.ensure_future(other())
        try:
            await reader.wait()
        except (Exception, Panic) as error:
            assert await of_other == "whole"
            raise error

    asyncio.run(both())


def read_async_pieces(reader):
    async def pieces():
        return [piece async for piece in reader]

    asyncio.run(pieces())


READERS = (read_result, read_pieces, read_async, read_async_pieces)


@pytest.mark.parametrize("where", ["until", "truth", "decode"])
def test_a_callers_function_ends_its_own_request_alone(where):
    """The kind of error and the way of reading do not matter."""
    options, others = dict(num_samples=4, max_new_tokens=8, seed=5), OPTIONS[0]
    e = engine(PrefixSum(sharpness=3.0), tokenizer=Pieces(), max_slots=4)
    wanted, of_bad = e.generate(PROMPTS[0], **others), e.generate(BAD, **options)
    tokenizer, decode, raised = e.tokenizer, e.tokenizer.decode, []

    def fails(ids, **rest):
        parts = [[*ids][i : i + 3] for i in range(len(ids))]
        if where == "decode" and raised and of_bad.tokens[1][:3] in parts:
            raise raised[-1]
        return decode(ids, **rest)

    def until(samples):
        if where == "decode" or len(samples) < 2:
            return False
        if where == "truth":
            return Doubtful(raised[-1])
        raise raised[-1]

    tokenizer.decode = fails
    service = csd.AsyncEngine(e, max_tokens=256, budget=6)
    for kind in RAISED:
        raised.append(kind("mine"))
        other = service.submit(PROMPTS[0], **others)
        readers = [service.submit(BAD, **options, until=until) for _ in READERS]
        for read, bad in zip(READERS, readers, strict=True):
            with pytest.raises((Exception, Panic)) as caught:
                read(bad)
            got = caught.value
            if kind in SIGNALS:
                # which no reader's frames take for their own
                assert isinstance(got, RuntimeError) and kind.__name__ in str(got)
                got = got.__cause__
            assert got is raised[-1]
            kept = caught.value.samples.tokens
            assert all(t == w[: len(t)] for t, w in zip(kept, of_bad.tokens, strict=True))
            assert kept[0] == of_bad.tokens[0] if where != "decode" else any(kept)
        assert other.result(60).tokens == wanted.tokens
    assert service.counters.failed == len(READERS) * len(RAISED)
    assert free(service)
