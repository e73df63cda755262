"""`csd serve --group-window`: equal prompts without a seed that arrive together are one group."""

import json

import pytest
from helpers.runs.served import call, opened, served

import csd

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from csd.serve.http import clients

BODY = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": True, "temperature": 1}


def text_of(stream) -> str:
    events = [line[6:] for line in stream.read().split(b"\n") if line.startswith(b"data: {")]
    return "".join(c["text"] for event in events for c in json.loads(event)["choices"])


def shared_tokens(port, state, bodies) -> tuple[int, list]:
    """Tokens of prompts that the requests share while all are in flight; their streams."""
    before = state.engine.counters.shared_prompt_tokens
    streams = []
    for body in bodies:
        streams.append(opened(port, "/v1/completions", body))
        streams[-1].read(10)
    return state.engine.counters.shared_prompt_tokens - before, streams


@pytest.mark.parametrize(("window", "shared"), [(60_000, 3), (0, 0)])
def test_equal_prompts_without_a_seed_are_one_group(engine, window, shared):
    service = csd.AsyncEngine(engine, max_tokens=300)
    with served(service, group_window=window) as (port, state):
        other, seeded = BODY | {"prompt": "xyz"}, BODY | {"seed": 1}
        tokens, streams = shared_tokens(port, state, [BODY, BODY | {"seed": -1}, other, seeded])
        assert tokens == shared
        # one leaves: the other goes on, and has a seed of its own
        streams[0].close()
        texts = [text_of(stream) for stream in streams[1:]]
        assert len(set(texts)) == 3
        # a seed determines a text, whatever was in flight; a stream's first event has been read
        status, alone = call(port, "/v1/completions", seeded | {"stream": False})
        assert status == 200 and texts[2]
        assert alone["choices"][0]["text"].endswith(texts[2])
        # options are each request's own
        limits = [BODY | {"max_tokens": n, "stream": False, "n": n - 2} for n in (3, 4)]
        answers = [call(port, "/v1/completions", body)[1] for body in limits]
        assert [len(a["choices"]) for a in answers] == [1, 2]
        assert [a["usage"]["completion_tokens"] for a in answers] == [3, 8]
        # nothing stays after them
        assert state.engine.counters.cached_pages == 0


def test_a_window_ends_and_is_one_address(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(clients.time, "monotonic", lambda: now[0])
    state = clients.Clients((), False, 0.02)
    first = state.group("a")
    now[0] = 0.019
    assert state.group("a") == first != state.group("b")
    now[0] = 0.021
    assert state.group("a") != first
    assert clients.Clients((), False).group("a") is None
