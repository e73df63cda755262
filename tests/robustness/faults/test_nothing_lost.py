"""Samples are kept however a call fails: written, returned, or in the error."""

import resource
import shutil
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from faults import OPTIONS, PROMPTS, assert_usable
from helpers.models.scripted import Letters

import csd
from csd.integrations.groups import draw
from csd.traces.traces import read_traces


@contextmanager
def files_of_any_size():
    """Undo `fill` at the end of the call, before pytest writes to a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill(folder):
    """From now on files grow to a few bytes only, as on a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))


def check_beginnings(samples, expected):
    """All that was drawn, and nothing else; at least a token of it."""
    assert isinstance(samples, list) and len(samples) == len(expected)
    for out, whole in zip(samples, expected, strict=True):
        assert isinstance(out, csd.Samples) and len(out) == len(whole)
        for sample, tokens in zip(out, whole, strict=True):
            assert sample.tokens == tokens[: len(sample.tokens)]
            assert sample.finish_reason == "cancelled" or sample.tokens == tokens
    assert any(sample.tokens for out in samples for sample in out)


ACCIDENTS = {"full": fill, "folder removed": shutil.rmtree}


@pytest.mark.parametrize("accident", ACCIDENTS)
@pytest.mark.parametrize("end", ["record", "history", "both"])
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[0]], ids=["list", "one"])
def test_unwritable_results_are_in_the_error(e, expected, tmp_path, accident, end, prompts):
    (tmp_path / "to").mkdir()
    (tmp_path / "kept").mkdir()
    whole = isinstance(prompts, list)
    places = {name: tmp_path / "to" / f"{name}.jsonl" for name in ("record", "history")}
    if end != "both":
        other = {"record": "history", "history": "record"}[end]
        places[other] = tmp_path / "kept" / f"{other}.jsonl"
    done = []

    def strike(*args):
        if not done:
            done.append(ACCIDENTS[accident](tmp_path / "to"))

    with (
        files_of_any_size(),
        csd.History(path=places["history"], top=True) as history,
        pytest.raises(OSError, match=str(tmp_path)) as caught,
    ):
        csd.generate(
            e, prompts, history=history, record=str(places["record"]), callback=strike, **OPTIONS
        )
    samples = caught.value.samples
    assert [s.tokens for s in samples] == expected if whole else samples.tokens == expected[0]
    assert "cancelled" not in (samples[0] if whole else samples).finish_reasons
    # the one that fails takes nothing from the other
    for place in places.values():
        if place.parent.name == "kept" and accident == "folder removed":
            assert [t.samples for t in read_traces(place)] == expected[: 2 if whole else 1]
    assert [out.tokens for out in csd.generate(e, PROMPTS, **OPTIONS)] == expected


@dataclass(frozen=True)
class Frozen(Exception):
    at: int = 0


@pytest.mark.parametrize("error", [ValueError, Frozen, SystemExit], ids=lambda e: e.__name__)
@pytest.mark.parametrize("what", ["callback", "until", "progress", "decode"])
def test_callback_errors_carry_the_samples(e, expected, tmp_path, monkeypatch, what, error):
    calls = []

    def fail(*args, **kwargs):
        calls.append(args)
        if len(calls) > 2:
            raise error
        return False

    record = str(tmp_path / "t.jsonl")
    more = {what: fail} if what in ("callback", "until") else {}
    if what == "progress":
        monkeypatch.setattr("csd.engine.call.Bar.show", fail)
        more = dict(progress=True)
    if what == "decode":
        tokenizer = Letters()
        decode = tokenizer.decode
        longest = max(map(len, PROMPTS))

        def failing(ids, **kwargs):
            # prompts are decoded too, before the first token
            return (len(ids) > longest and fail()) or decode(ids, **kwargs)

        tokenizer.decode = failing
        more = dict(tokenizer=tokenizer)
    with pytest.raises(error) as caught:
        csd.generate(e, PROMPTS, record=record, **more, **OPTIONS)
    check_beginnings(caught.value.samples, expected)
    finished = [s for out in caught.value.samples for s in out if s.finish_reason != "cancelled"]
    written = [s for t in read_traces(record) for s in t.samples] if finished else []
    assert written == [s.tokens for s in finished]
    calls.clear()
    with pytest.raises(error) as caught:
        csd.generate(e, PROMPTS[0], **more, **OPTIONS)
    assert isinstance(caught.value.samples, csd.Samples)
    calls.clear()
    with pytest.raises(error) as caught:
        for _ in csd.stream(e, PROMPTS, **more, **OPTIONS):
            pass
    check_beginnings(caught.value.samples, expected)
    assert_usable(e, PROMPTS[1], expected[1], **OPTIONS)


@pytest.mark.parametrize("error", [GeneratorExit, StopIteration, StopAsyncIteration])
@pytest.mark.parametrize("what", ["callback", "until", "logits_processor"])
def test_the_end_of_a_generator_is_an_error_of_the_function_that_raises_it(
    e, expected, what, error
):
    calls = []

    def fail(*args):
        calls.append(args)
        # not before the first tokens
        if len(calls) > (20 if what == "logits_processor" else 2):
            raise error
        return args[-1] if what == "logits_processor" else False

    more = {what: [fail] if what == "logits_processor" else fail}
    for run in (csd.generate, lambda *args, **options: [*csd.stream(*args, **options)]):
        calls.clear()
        with pytest.raises(RuntimeError, match=f"{what} raised {error.__name__}") as caught:
            run(e, PROMPTS, **more, **OPTIONS)
        assert isinstance(caught.value.__cause__, error)
        check_beginnings(caught.value.samples, expected)
    assert_usable(e, PROMPTS[1], expected[1], **OPTIONS)


def test_a_tokenizer_that_fails_after_an_interrupt(e, expected):
    """The texts of unfinished samples are made last of all."""

    tokenizer = Letters()

    def fail(*args, **kwargs):
        raise RuntimeError("no words")

    def interrupt(*args):
        tokenizer.decode = fail
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        csd.generate(e, PROMPTS, tokenizer=tokenizer, callback=interrupt, **OPTIONS)
    check_beginnings(caught.value.samples, expected)


def test_integrations_carry_samples_too(e, expected, tmp_path):
    params = e.prepare(PROMPTS, **OPTIONS).requests[0].params
    groups = [([ord(c) - ord("a") + 4 for c in p], params, range(3)) for p in PROMPTS]
    calls = []

    def fail(*args):
        calls.append(args)
        if len(calls) > 6:
            raise ValueError

    with csd.History(path=tmp_path / "h.jsonl") as history, pytest.raises(ValueError) as caught:
        draw(e, groups, seed=4, history=history, on_tokens=fail)
    finished = [s for out in caught.value.samples for s in out if s.finish_reason != "cancelled"]
    assert any(s.tokens for out in caught.value.samples for s in out)
    kept = [s for t in read_traces(tmp_path / "h.jsonl") for s in t.samples]
    assert kept == [s.tokens for s in finished]
