"""Two hundred clients beside attacks: their choices are `csd.generate`'s, and memory stays."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from crowd import CLIENTS, body_of
from served import call, served

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
    "prompt": lambda i: ("/tokenize", {"prompt": "ab" * 2_000_000}),
    "ids": lambda i: ("/detokenize", {"tokens": [5] * 2_000_000}),
}


@pytest.fixture(scope="module")
def wants(engine):
    """Texts of each client."""
    listed = []
    for body in map(body_of, range(CLIENTS)):
        want = csd.generate(
            engine,
            body["prompt"],
            num_samples=body["n"],
            seed=body["seed"],
            max_new_tokens=body["max_tokens"],
        )
        listed.append(want.texts)
    return listed


@pytest.mark.parametrize("attack", ATTACKS)
def test_two_hundred_clients_beside_an_attack_get_their_samples(engine, wants, attack):
    service = csd.AsyncEngine(engine, max_tokens=200, budget=8, max_queue=300)
    ended, statuses = threading.Event(), set()
    with served(service, keys=("victim", "attacker")) as (port, _):

        def attacks(i):
            while not ended.is_set():
                statuses.add(call(port, *ATTACKS[attack](i), "attacker")[0])

        attackers = [threading.Thread(target=attacks, args=(i,)) for i in range(3)]
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
    assert statuses and statuses <= {200, 400, 413, 429, 503}, statuses
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
