"""Requests of one owner: a prompt is read once, and equal samples are drawn once."""

import random
import time

import pytest
import torch
from helpers.models.scripted import VOCAB, LastToken, Letters, PrefixSum, counting, engine
from helpers.runs.engine_cases import free, plain, prompts
from helpers.targets import few

import csd
from csd.engine.step import prefill


@pytest.fixture
def read(monkeypatch):
    """Tokens of each chunk of a prompt that is read."""
    found, before = [], prefill.read_prompts

    def watched(step, parts):
        found.extend(len(part.tokens) for part in parts)
        return before(step, parts)

    monkeypatch.setattr(prefill, "read_prompts", watched)
    return found


def test_requests_of_one_owner_are_a_group(read):
    model = counting(end=25)
    with csd.AsyncEngine(engine(model, max_slots=12), max_tokens=3000, budget=0) as service:
        read.clear()
        prompt = [*range(20)] * 10
        asked = dict(num_samples=2, max_new_tokens=2500, seed=1, detached=True)
        first = service.submit(prompt, owner="a", **asked)
        next(iter(first))
        later = [
            service.submit(prompt, owner=owner, num_samples=2, max_new_tokens=4, seed=2)
            for owner in ("a", "b", None, None)
        ]
        results = [handle.result(60) for handle in later]
        first.cancel()
        assert sum(read) == 4 * (len(prompt) - 1)
        assert service.counters.shared_prompt_tokens == len(prompt)
        assert len({str(r.tokens) for r in results}) == 1
        # each begins at its own first index
        assert [[s.index for s in r] for r in results] == [[0, 1]] * 4
        assert free(service)


def test_a_group_outlives_the_request_that_began_it():
    model = PrefixSum(sharpness=4.0)
    service = csd.AsyncEngine(engine(model, max_slots=4), max_tokens=600)
    prompt = prompts(9, 300)[4]
    first = service.submit(prompt, owner="a", max_new_tokens=200, seed=1, detached=True)
    next(iter(first))
    second = service.submit(prompt, owner="a", max_new_tokens=200, seed=2, detached=True)
    next(iter(second))
    assert service.counters.shared_prompt_tokens == len(prompt)
    first.cancel()
    other = service.submit(prompt[::-1], max_new_tokens=100, seed=3)
    assert second.result(60).tokens[0] == plain(model, prompt, 2, 0, 200)
    assert other.result(60).tokens[0] == plain(model, prompt[::-1], 3, 0, 100)
    assert first.result().finish_reasons == ["cancelled"]
    assert free(service)


def test_equal_samples_of_one_owner_are_drawn_once():
    """Later requests get what is there, with the text so far; others draw their own."""
    e = engine(PrefixSum(sharpness=4.0), tokenizer=Letters(), max_slots=4)
    options = dict(num_samples=3, max_new_tokens=60, seed=1)
    want = e.generate([1, 2], **options)
    with csd.AsyncEngine(e, max_tokens=600, budget=0) as service:
        first = service.submit([1, 2], owner="a", detached=True, **options)
        next(iter(first))
        later = {
            "the same": service.submit([1, 2], owner="a", **options),
            "some of them": service.submit(
                [1, 2], owner="a", first_sample=1, **options | dict(num_samples=4)
            ),
            "another owner": service.submit([1, 2], owner="b", **options),
            "no owner": service.submit([1, 2], **options),
            "another seed": service.submit([1, 2], owner="a", **options | dict(seed=2)),
            "whole": service.submit([1, 2], owner="a", stream=False, **options),
        }
        received = {i: [[], ""] for i in range(3)}
        for piece in later["the same"]:
            received[piece.index][0] += piece.tokens
            received[piece.index][1] += piece.text
        results = {name: handle.result(60) for name, handle in later.items()}
        assert first.result(60).tokens == want.tokens
        for name in ("the same", "another owner", "no owner", "whole"):
            assert results[name].tokens == want.tokens and results[name].texts == want.texts
        assert results["some of them"].tokens[:2] == want.tokens[1:]
        assert [received[i] for i in range(3)] == [
            [t, x] for t, x in zip(want.tokens, want.texts, strict=True)
        ]
        assert results["another seed"].tokens != want.tokens
        assert service.counters.shared_samples == 5
        # of those that were not shared: 3 of the first, 2 more, and 3 of each of 4 requests
        assert service.counters.tokens == 60 * (3 + 2 + 3 * 4)
        assert free(service)


@few(1)
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_sample_outlives_the_request_that_drew_it(kept):
    """Two of three requests for the same samples leave in the middle."""
    e = engine(PrefixSum(sharpness=4.0), tokenizer=Letters(), max_slots=2)
    options = dict(num_samples=4, max_new_tokens=100, seed=1)
    want = e.generate([1, 2], **options)
    service = csd.AsyncEngine(e, max_tokens=600, budget=0)
    handles = [service.submit([1, 2], owner="a", **options) for _ in range(3)]
    while not all(any(p.tokens for p in handle.take()[0]) for handle in handles):
        time.sleep(0.001)
    for i, handle in enumerate(handles):
        if i != kept:
            handle.cancel()
    assert handles[kept].result(60).tokens == want.tokens
    assert handles[kept].result().texts == want.texts
    for i, handle in enumerate(handles):
        gone = handle.result(60)
        assert i == kept or "cancelled" in gone.finish_reasons
        assert all(a == b[: len(a)] for a, b in zip(gone.tokens, want.tokens, strict=True))
    assert service.counters.tokens <= 4 * 100
    assert free(service)


@few(2)
@pytest.mark.parametrize("draw", range(8))
def test_requests_that_arrive_together_get_their_samples(draw):
    """Whichever of them begins first, whose samples others wait for, and whichever leaves."""
    own = random.Random(draw)
    model = PrefixSum(sharpness=4.0)
    e = engine(model, tokenizer=Letters(), max_slots=3)
    asked = [
        dict(
            num_samples=own.randint(1, 4), first_sample=own.randint(0, 2), seed=own.randint(0, 1),
            max_new_tokens=20,
        )
        for _ in range(24)
    ]  # fmt: skip
    with csd.AsyncEngine(e, max_tokens=600, budget=own.choice([0, 4])) as service:
        with service._inbox._changed:
            handles = [
                service.submit([1, 2], owner="a", stream=own.random() < 0.7, **options)
                for options in asked
            ]
        leaving = {i for i in range(24) if own.random() < 0.2}
        for i in leaving:
            handles[i].cancel()
        for i, (handle, options) in enumerate(zip(handles, asked, strict=True)):
            result = handle.result(60)
            for sample in result:
                want = plain(model, [1, 2], options["seed"], sample.index, 20)
                if i in leaving:
                    want = want[: len(sample.tokens)]
                assert sample.tokens == want
        assert free(service)


def test_an_error_of_a_sample_is_that_of_all_who_asked_for_it():
    def logits_of(token, position):
        logits = torch.zeros(token.shape[0], VOCAB, dtype=torch.float64)
        logits[position == 40] = float("nan")
        return logits

    service = csd.AsyncEngine(engine(LastToken(logits_of), max_slots=2), budget=0, max_tokens=600)
    handles = [
        service.submit([1, 2], owner="a", num_samples=2, max_new_tokens=60, seed=1)
        for _ in range(3)
    ]
    for handle in handles:
        with pytest.raises(FloatingPointError, match="NaN") as raised:
            handle.result(60)
        assert len(raised.value.samples) == 2
    assert free(service)


def test_until_of_one_request_is_not_anothers():
    model = PrefixSum(sharpness=4.0)
    service = csd.AsyncEngine(engine(model, max_slots=2), max_tokens=600, budget=0)
    options = dict(owner="a", num_samples=4, max_new_tokens=30, seed=1)
    few = service.submit([1, 2], until=lambda prefix: len(prefix) >= 2, **options)
    every = service.submit([1, 2], **options)

    def broken(prefix):
        raise KeyError("until")

    bad = service.submit([1, 2], until=broken, **options)
    want = [plain(model, [1, 2], 1, i, 30) for i in range(4)]
    assert every.result(60).tokens == want
    assert few.result(60).tokens[:2] == want[:2]
    assert few.result().finish_reasons == ["length"] * 2 + ["cancelled"] * 2
    with pytest.raises(KeyError):
        bad.result(60)
    assert free(service)
