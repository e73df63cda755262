"""Two hundred clients beside attacks: their choices are `csd.generate`'s, and memory stays."""

import gc
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from crowd import CLIENTS, body_of, expected
from helpers.runs.served import call, served

import csd
from csd.serve.http.metrics import resident_bytes

pytest.importorskip("starlette")
pytest.importorskip("llguidance")

CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"


def schema(inside):
    return {"type": "json_schema", "json_schema": {"schema": inside}}


def properties(count, own):
    listed = {f"p{own}_{i}": {"type": "string"} for i in range(count)}
    return schema({"type": "object", "properties": listed})


CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
TEXT = {"prompt": "ab", "max_tokens": 2}
ATTACKS = {
    "program": lambda i: (
        CHATS,
        CHAT | {"chat_template_kwargs": {"chat_template": "{{ (9**30000000) % 7 }}"}},
    ),
    "turns": lambda i: (CHATS, CHAT | {"messages": [{"role": "tool", "content": "x"}] * 1000}),
    "enum": lambda i: (TEXTS, TEXT | {"response_format": schema({"enum": [*range(200_000)]})}),
    "properties": lambda i: (TEXTS, TEXT | {"response_format": properties(1500, i)}),
    "patterns": lambda i: (
        TEXTS,
        TEXT
        | {
            "response_format": schema(
                {
                    "allOf": [
                        {"type": "string", "pattern": f"^.*a.{{{j}}}b{i}.*$"} for j in range(30)
                    ]
                }
            )
        },
    ),
    "words": lambda i: (TEXTS, TEXT | {"bad_words": [f"w{j}" for j in range(8000)]}),
    "prompt": lambda i: ("/tokenize", {"prompt": "ab" * 900_000}),
    "ids": lambda i: ("/detokenize", {"tokens": [5] * 600_000}),
    "lists": lambda i: (TEXTS, b'{"prompt": [' + b"[]," * 690_000 + b"[]]}"),
    "objects": lambda i: (TEXTS, b'{"prompt": [' + b'{"a":{}},' * 230_000 + b"1]}"),
    "answer": lambda i: (TEXTS, TEXT | {"n": 100, "max_tokens": 190, "logprobs": 20, "seed": i}),
}


def sends(data, then=lambda connection: None):
    """An attack by a connection that sends some bytes of a request."""

    def attack(port, i):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            connection.sendall(data(i))
            then(connection)
            # a connection that waits, not a flood of them
            time.sleep(1)

    return attack


def whole(body, length=None, more=""):
    data = json.dumps(body).encode()
    return (
        f"POST {TEXTS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer attacker\r\n{more or f'Content-Length: {length or len(data)}'}"
        "\r\n\r\n"
    ).encode() + (b"" if more else data)


MUCH = TEXT | {"n": 50, "max_tokens": 190, "ignore_eos": True, "logprobs": 20, "stream": True}
CONNECTIONS = {
    "silent": sends(lambda i: b""),
    "slow head": sends(lambda i: b"POST /v1/comp"),
    "slow body": sends(lambda i: whole(TEXT, length=1000)),
    "tiny parts": sends(
        lambda i: whole(TEXT, more="Transfer-Encoding: chunked") + b"1\r\na\r\n" * 1000
    ),
    "reads nothing": sends(lambda i: whole(MUCH | {"seed": i})),
    "half closed": sends(
        lambda i: whole(MUCH | {"seed": i}), lambda one: one.shutdown(socket.SHUT_WR)
    ),
    "many at once": sends(lambda i: whole(TEXT | {"seed": i}) * 50),
}


def posts(make):
    return lambda port, i: call(port, *make(i), "attacker")[0]


ALL = {name: posts(make) for name, make in ATTACKS.items()} | CONNECTIONS


@pytest.fixture(scope="module")
def wants(engine):
    """Texts of each client."""
    return [expected(engine, i) for i in range(CLIENTS)]


@pytest.mark.parametrize("attack", ALL)
def test_two_hundred_clients_beside_an_attack_get_their_samples(engine, wants, attack):
    service = csd.AsyncEngine(engine, max_tokens=200, budget=8, max_queue=300)
    ended, statuses = threading.Event(), set()
    with served(service, keys=("victim", "attacker")) as (port, _):

        def attacks(i):
            while not ended.is_set():
                statuses.add(ALL[attack](port, i))

        count = 40 if attack in CONNECTIONS else 3
        attackers = [threading.Thread(target=attacks, args=(i,)) for i in range(count)]
        for thread in attackers:
            thread.start()

        def victim(i):
            status, answer = call(port, TEXTS, body_of(i) | {"stream": False}, "victim")
            assert status == 200, answer
            return [choice["text"] for choice in answer["choices"]]

        try:
            with ThreadPoolExecutor(32) as pool:
                texts = [*pool.map(victim, range(CLIENTS))]
        finally:
            ended.set()
            for thread in attackers:
                thread.join()
    assert statuses and statuses <= {200, 400, 413, 429, 503, None}, statuses
    assert texts == wants


LARGE = {
    "regex": lambda i: {"regex": f"[ab]{{1,9}}({'|'.join(f'w{i}x{j}' for j in range(2000))})?"},
    "response_format": lambda i: {
        "response_format": schema(
            {
                "anyOf": [
                    {"type": "object", "properties": {f"p{i}x{j}": {"const": j}}}
                    for j in range(500)
                ]
            }
        )
    },
    "grammar": lambda i: {
        "grammar": 'start: "a"+ b?\nb: ' + "|".join(f'"w{i}x{j}"' for j in range(2000))
    },
    "prompt": lambda i: {"prompt": f"{i} " * 40},
    "stop": lambda i: {"stop": [f"{i}x{j}" for j in range(1000)]},
    "bad_words": lambda i: {"bad_words": [f"{i}x{j}" for j in range(200)]},
    "seed": lambda i: {"seed": i, "user": f"{i}" * 50_000},
    "model": lambda i: {"model": f"{i}" * 50_000},
    "unknown": lambda i: {f"{i}" * 1000: 1},
}


@pytest.mark.parametrize("field", LARGE)
def test_memory_does_not_grow_with_different_values(engine, field):
    """Not with what the server has read, nor with what it has refused."""

    def rounds(port, first, count):
        for i in range(first, first + count):
            call(port, TEXTS, TEXT | {"seed": 1} | LARGE[field](i))
        gc.collect()
        return resident_bytes()

    service = csd.AsyncEngine(engine, max_tokens=200, budget=8)
    with served(service) as (port, _):
        first, second, third = (rounds(port, start, 30) for start in (0, 30, 60))
    # each value has some 30 kB, and its compiled form megabytes. What is kept grows in each round,
    # and the allocator's own memory in one
    growth = min(second - first, third - second) / 30
    assert growth < 100_000, growth
