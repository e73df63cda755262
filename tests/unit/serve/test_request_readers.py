"""Requests whose readers leave: they are cancelled, and the next request gets their slots."""

import asyncio
import gc
import weakref

import pytest
from helpers.models.scripted import PrefixSum, engine

import csd

# far more tokens than are drawn before a reader has left
LONG = 400


def broken_loop(service, **options):
    reader = service.submit([1, 2], max_new_tokens=LONG, seed=1, **options)
    for _ in reader:
        break
    return reader, reader.request


def broken_async_loop(service, **options):
    async def read():
        reader = service.submit([1, 2], max_new_tokens=LONG, seed=1, **options)
        async for _ in reader:
            break
        return reader

    reader = asyncio.run(read())
    return reader, reader.request


def timed_out(service, **options):
    reader = service.submit([1, 2], max_new_tokens=LONG, seed=1, **options)
    with pytest.raises(TimeoutError, match=r"has not finished within 0\.01 seconds"):
        reader.result(0.01)
    return reader, reader.request


def timed_out_in_a_loop(service, **options):
    async def read():
        reader = service.submit([1, 2], max_new_tokens=LONG, seed=1, **options)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.wait(), 0.01)
        return reader

    reader = asyncio.run(read())
    return reader, reader.request


def cancelled_task(service, **options):
    async def read():
        reader = service.submit([1, 2], max_new_tokens=LONG, seed=1, **options)
        task = asyncio.ensure_future(reader.wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return reader

    reader = asyncio.run(read())
    return reader, reader.request


def collected(service, **options):
    reader = service.submit([1, 2], max_new_tokens=LONG, seed=1, **options)
    request = reader.request
    # a cycle, which only a collection frees
    loop = [reader]
    loop.append(loop)
    del reader, loop
    gc.collect()
    return None, request


WAYS = [
    broken_loop,
    broken_async_loop,
    timed_out,
    timed_out_in_a_loop,
    cancelled_task,
    collected,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_reader_that_leaves_cancels_its_request(way):
    with csd.AsyncEngine(engine(PrefixSum(), max_slots=1)) as service:
        _, request = way(service)
        victim = service.submit([3], max_new_tokens=5, seed=0).result(60)
        assert victim.finish_reasons == ["length"]
        # the only slot was free long before the end of the first request, or never taken
        (sample,) = request.result()
        assert sample.finish_reason == "cancelled" and len(sample.tokens) < LONG
        assert service.counters.steps < LONG


@pytest.mark.parametrize("way", [broken_loop, timed_out, collected], ids=lambda way: way.__name__)
def test_a_detached_request_is_drawn_to_its_end(way):
    with csd.AsyncEngine(engine(PrefixSum(), max_slots=1)) as service:
        _, request = way(service, detached=True)
        service.submit([3], max_new_tokens=5, seed=0).result(60)
        assert request.result().finish_reasons == ["length"]
        assert len(request.progress.finished[0].tokens) == LONG


def test_the_last_of_several_readers_cancels():
    with csd.AsyncEngine(engine(PrefixSum(), max_slots=1)) as service:
        reader = service.submit([1, 2], max_new_tokens=200, seed=1)
        first, second = iter(reader), iter(reader)
        next(first)
        next(second)
        first.close()
        (sample,) = [piece.sample for piece in second if piece.sample is not None]
        assert sample.finish_reason == "length" and reader.done


def test_a_waiting_request_that_nobody_holds_is_never_begun():
    with csd.AsyncEngine(engine(PrefixSum(), max_slots=1)) as service:
        busy = service.submit([1, 2], max_new_tokens=LONG, seed=1, detached=True)
        waiting = service.submit([4], max_new_tokens=LONG, seed=1)
        request = waiting.request
        del waiting
        gc.collect()
        busy.cancel()
        service.submit([3], max_new_tokens=5, seed=0).result(60)
        assert request.result()[0].tokens == [] and service.waiting == 0


def test_a_stream_that_is_left_frees_its_engine():
    e = engine(PrefixSum(), max_slots=2)
    for _ in csd.stream(e, [1, 2], num_samples=9, max_new_tokens=30, seed=1):
        break
    assert len(csd.generate(e, [3], max_new_tokens=5)[0].tokens) == 5


def test_a_request_that_has_ended_with_an_error_is_freed():
    """Its error's frames refer to the reader, and the reader to the error."""
    service = csd.AsyncEngine(engine(PrefixSum(), max_slots=2), max_tokens=300)
    handle = service.submit([1, 2], max_new_tokens=5, seed=1, until=lambda prefix: 1 / 0)
    with pytest.raises(ZeroDivisionError) as raised:
        handle.result(60)
    ended = weakref.ref(handle._handle)
    assert raised.value.samples is not None
    del handle, raised
    service.close()
    gc.collect()
    assert ended() is None
