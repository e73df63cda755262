"""Pieces of a request's samples: when its readers get them, and what they add up to."""

import asyncio

from helpers.models.scripted import Letters, PrefixSum, engine
from helpers.runs.engine_cases import prompts

import csd
from csd.engine.step import prefill


def test_pieces_are_the_samples():
    e = engine(PrefixSum(), tokenizer=Letters(), max_slots=4)
    with csd.AsyncEngine(e, max_tokens=300) as service:
        handle = service.submit(
            "abc", num_samples=3, max_new_tokens=60, seed=4, stop=["q"], top_logprobs=3
        )
        found = {i: [] for i in range(3)}
        for piece in handle:
            found[piece.index].append(piece)
        for sample in handle.result():
            pieces = found[sample.index]
            # as many as the reader took, on a busy machine one
            assert "".join(p.text for p in pieces) == sample.text
            assert [t for p in pieces for t in p.tokens] == sample.tokens
            assert [x for p in pieces for x in p.raw_logprobs] == sample.raw_logprobs
            assert len([x for p in pieces for x in p.top]) == len(sample.tokens)
            assert pieces[-1].sample == sample


def test_the_first_tokens_come_with_the_first_step(monkeypatch):
    """Behind a long prompt too, while others are drawn."""
    with csd.AsyncEngine(engine(PrefixSum(), max_slots=4, prefill_chunk=64)) as service:
        busy = service.submit([1, 2], max_new_tokens=2000, seed=1, detached=True)
        next(iter(busy))
        handle = service.submit(prompts(9, 3000)[5] * 4, max_new_tokens=5, seed=1)
        steps, before = [], handle._handle.push

        def push(*news):
            steps.append(service.counters.steps)
            before(*news)

        handle._handle.push = push
        read = []
        read_prompts = prefill.read_prompts

        def watched(*parts):
            read.append(service.counters.steps)
            return read_prompts(*parts)

        monkeypatch.setattr(prefill, "read_prompts", watched)
        handle.result(60)
        busy.cancel()
        assert len(read) > 20 and steps[0] <= read[-1] + 1


def test_a_sample_comes_whole_where_it_is_not_streamed():
    e = engine(PrefixSum(), tokenizer=Letters())
    with csd.AsyncEngine(e, max_tokens=300) as service:
        handle = service.submit("abc", num_samples=3, max_new_tokens=20, seed=4, stream=False)
        pieces = [*handle]
        assert sorted(p.index for p in pieces) == [0, 1, 2]
        assert {p.index: p.text for p in pieces} == dict(enumerate(handle.result().texts))


def test_event_loops_read_too():
    e = engine(PrefixSum(), tokenizer=Letters(), max_slots=3)

    async def client(service, seed):
        handle = service.submit("abc", num_samples=2, max_new_tokens=40, seed=seed)
        found = ["", ""]
        async for piece in handle:
            found[piece.index] += piece.text
        assert found == (await handle.wait()).texts
        return found

    async def clients(service):
        return await asyncio.gather(*(client(service, seed) for seed in range(6)))

    with csd.AsyncEngine(e, max_tokens=300) as service:
        texts = asyncio.run(clients(service))
        assert texts == [
            service.submit("abc", num_samples=2, max_new_tokens=40, seed=s).result().texts
            for s in range(6)
        ]


def test_one_slow_reader_stops_nobody():
    with csd.AsyncEngine(engine(PrefixSum(), max_slots=2), max_tokens=600) as service:
        slow = service.submit([1, 2], max_new_tokens=400, seed=1)
        quick = service.submit([1, 3], max_new_tokens=400, seed=1)
        quick.result(60), slow.result(60)
        pieces, ended = slow.take()
        # what was not taken is one piece
        assert ended and len(pieces) == 1 and pieces[0].tokens == slow.result().tokens[0]
