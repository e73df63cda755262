"""Places of requests and of the queue that a client leaves for others, and JSON in parts."""

import json
import random
import threading

import pytest
from helpers.runs.served import call, chat, served

import csd
from csd.serve.places import Places


@pytest.mark.parametrize("count", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("clients", [1, 2, 3, 5])
def test_clients_that_take_all_they_can_leave_places(count, clients):
    places, own = Places(count), random.Random(count)
    waiting = [*range(clients)]
    held = dict.fromkeys(waiting, 0)
    while waiting:
        client = own.choice(waiting)
        if places.allows(client):
            places.take(client)
            held[client] += 1
        else:
            waiting.remove(client)
    assert places.held == sum(held.values())
    assert max(held.values()) <= count // 2 + count % 2
    # each leaves half of what it finds
    if count >= 2 << clients:
        assert places.allows("later") and min(held.values()) >= count >> clients + 1
    for client, number in held.items():
        for _ in range(number):
            places.give(client)
    assert places.held == 0 and not places._of


def test_a_client_without_others_takes_all():
    places = Places(5)
    for _ in range(5):
        assert places.allows(None)
        places.take(None)
    assert places.full and not places.allows(None) and not places.allows("another")


def test_the_queue_keeps_places_for_other_clients(engine):
    service = csd.AsyncEngine(engine, max_tokens=200, budget=4, max_queue=8)
    begun = threading.Event()
    goes_on = threading.Event()

    def hold(_):
        begun.set()
        assert goes_on.wait(60)

    change = threading.Thread(target=service.update, args=(hold,))
    change.start()
    assert begun.wait(60)
    options = dict(max_new_tokens=2, seed=1)
    handles = [service.submit("a", client="a", **options) for _ in range(4)]
    with pytest.raises(csd.QueueFull, match="max_queue=8 requests has 4, and this client's share"):
        service.submit("a", client="a", **options)
    handles += [service.submit("b", client="b", **options) for _ in range(2)]
    handles += [service.submit("c", **options) for _ in range(2)]
    with pytest.raises(csd.QueueFull, match="has max_queue=8 waiting requests"):
        service.submit("c", **options)
    # one that leaves frees its place, for its own client too
    handles.pop(0).cancel()
    handles.append(service.submit("b", client="d", **options))
    goes_on.set()
    change.join()
    wants = [csd.generate(engine, h.prompt_ids, **options).tokens for h in handles]
    assert [h.result(60).tokens for h in handles] == wants
    assert service.waiting == 0 and not service._inbox._places._of
    service.close()


@pytest.mark.parametrize(("keys", "most"), [(("one",), 8), (("one", "two"), 4)])
def test_a_key_leaves_requests_for_others(engine, keys, most):
    pytest.importorskip("starlette")
    from csd.serve.http import Limits

    limits = Limits(requests=8, read_seconds=60)
    service = csd.AsyncEngine(engine, max_tokens=300, budget=4)
    with served(service, limits=limits, keys=keys) as (port, server):
        goes_on, plain = threading.Event(), server.submit

        def waits(*args):
            assert goes_on.wait(60)
            return plain(*args)

        server.submit = waits
        path, body = "/v1/chat/completions", chat(max_tokens=3, seed=1)
        found = []
        threads = [
            threading.Thread(target=lambda: found.append(call(port, path, body, "one")))
            for _ in range(most)
        ]
        for thread in threads:
            thread.start()
        while server.open < most:
            pass
        status, answer = call(port, path, body, "one")
        assert status == (429 if most < 8 else 503), answer
        assert answer["error"]["code"] == "too_many_requests"
        if len(keys) > 1:
            found.append(None)
            later = threading.Thread(target=lambda: found.append(call(port, path, body, "two")))
            later.start()
            threads.append(later)
            found.remove(None)
        goes_on.set()
        for thread in threads:
            thread.join()
    assert [status for status, _ in found] == [200] * len(threads)
    assert len({answer["choices"][0]["message"]["content"] for _, answer in found}) == 1


def test_an_answer_has_a_bounded_number_of_likely_tokens():
    pytest.importorskip("starlette")
    from csd.serve.http import Limits
    from csd.serve.http.api.request import read_completion
    from csd.serve.http.errors import Refused
    from csd.serve.http.server import Server

    body = {"prompt": "ab", "n": 20, "max_tokens": 300, "logprobs": 20}

    class Small:
        limits = Limits(likely=20 * 20 * 300 - 1)

    with pytest.raises(Refused, match="must be at most 119999, got 20 times 6000") as refused:
        Server._check_likely(Small(), read_completion(body, None))
    assert refused.value.param == "logprobs"
    Small.limits = Limits(likely=20 * 20 * 300)
    Server._check_likely(Small(), read_completion(body, None))


def a_value(own, depth=0):
    kind = own.randrange(8 if depth < 4 else 6)
    if kind == 0:
        return own.choice([None, True, False])
    if kind == 1:
        return own.randrange(-(10**20), 10**20)
    if kind == 2:
        return own.random() * 10 ** own.randrange(-300, 300)
    if kind < 6:
        return "".join(own.choice('a"\\\n\u00e9\u2028\U0001f600\ud800 ,[]{}:') for _ in range(9))
    if kind == 6:
        return [a_value(own, depth + 1) for _ in range(own.randrange(6))]
    return {f'{i}"\u00e9\n': a_value(own, depth + 1) for i in range(own.randrange(4))}


@pytest.mark.parametrize("coding", ["utf-8", "utf-16", "utf-32-be", "utf-8-sig"])
@pytest.mark.parametrize("ascii", [True, False])
def test_json_in_parts_is_that_of_json(coding, ascii):
    from csd.serve.http.json_parts import AT_ONCE, dumps, loads

    own = random.Random(f"{coding} {ascii}")
    value = [a_value(own) for _ in range(2000)]
    assert dumps(value) == json.dumps(value)
    data = json.dumps(value, ensure_ascii=ascii).encode(coding, "surrogatepass")
    assert len(data) > AT_ONCE
    try:
        want = json.loads(data)
    except ValueError:
        with pytest.raises(ValueError):
            loads(data)
        return
    assert loads(data) == want == value
    for i in range(1, 30):
        cut = data[: own.randrange(len(data))] if i % 2 else data.replace(b",", b";", i)
        try:
            found = json.loads(cut)
        except ValueError:
            with pytest.raises(ValueError):
                loads(cut)
        # a comma within a text
        else:
            assert loads(cut) == found


@pytest.mark.parametrize("part", [b"[],", b'{"a":{}},', b"1,", b'"ab",'])
def test_other_threads_run_while_a_body_is_parsed(part):
    from csd.serve.http.clients import parse_body

    data = b'{"prompt":[' + part * ((1 << 18) // len(part)) + b"1]}"
    turns, ended = [0], threading.Event()

    def others():
        while not ended.is_set():
            turns[0] += 1

    thread = threading.Thread(target=others)
    thread.start()
    try:
        before = turns[0]
        parse_body(data)
        during = turns[0] - before
    finally:
        ended.set()
        thread.join()
    assert during > 1000
