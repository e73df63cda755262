"""Two hundred clients at once: some read slowly, some leave, some say nothing."""

import asyncio
import gc
import time

import pytest
from crowd import CLIENTS, body_of, clients, expected
from helpers.runs.served import served

import csd
from csd.models.demo import toy
from csd.serve.http.metrics import resident_bytes

pytest.importorskip("starlette")


@pytest.fixture(scope="module")
def engine():
    model, tokenizer = toy()
    model.generation_config.eos_token_id = [1, 40]
    return csd.Engine(model.double(), tokenizer=tokenizer, max_slots=32)


def test_every_request_is_answered_and_no_page_is_lost(engine):
    service = csd.AsyncEngine(engine, max_tokens=200, budget=8, max_queue=300)
    found = {}
    with served(service) as (port, server):
        asyncio.run(clients(port, found))
        while service.waiting or server.open or service.counters.slots:
            asyncio.run(asyncio.sleep(0.02))
    assert len(found) > CLIENTS / 3
    for i, texts in found.items():
        assert texts == expected(engine, i), (i, body_of(i))
    cache = engine.caches.step.cache
    assert len(cache.allocator) == cache.k.shape[1]
    counters = service.counters
    assert counters.failed == 0 and counters.requests >= len(found)


def test_a_full_queue_is_an_error_and_nothing_is_lost(engine):
    service = csd.AsyncEngine(engine, max_tokens=200, budget=8, max_queue=3)
    found = {}
    with served(service) as (port, _):
        asyncio.run(clients(port, found))
    refused = [i for i, texts in found.items() if texts == "queue_full"]
    answered = [i for i, texts in found.items() if isinstance(texts, list)]
    assert refused and answered and len(refused) + len(answered) == len(found)
    for i in answered:
        assert found[i] == expected(engine, i)


def test_memory_is_flat_over_ten_thousand_requests(engine):
    """Requests that end in every way leave nothing behind."""
    service = csd.AsyncEngine(engine, max_tokens=64, budget=2, max_queue=64)

    def round_of(count, first):
        handles = []
        for i in range(first, first + count):
            if len(handles) == 40:
                handles.pop(0).result(60)
            handle = service.submit(
                [i % 90, 5, 6],
                owner="me" if i % 3 else None,
                max_new_tokens=3,
                seed=i,
                top_logprobs=i % 2,
                stream=bool(i % 5),
            )
            if i % 7 == 0:
                handle.cancel()
            handles.append(handle)
        for handle in handles:
            handle.result(60)
        gc.collect()
        return resident_bytes()

    before = round_of(3000, 0)
    after = round_of(7000, 3000)
    counters = service.counters
    assert counters.requests + counters.withdrawn == 10_000 and counters.failed == 0
    # a result arrives before the turn that frees its pages has ended
    end = time.monotonic() + 10
    while service.counters.free_pages < counters.pages and time.monotonic() < end:
        time.sleep(0.01)
    assert service.counters.free_pages == counters.pages
    service.close()
    # what a request holds is some kilobytes
    assert after - before < 7000 * 1000
