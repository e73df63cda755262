"""A chat of several turns over HTTP: each turn reads only what is new, within one API key."""

from itertools import takewhile

import pytest
from helpers.runs.served import NAME, call, events, served

import csd
from csd.models.demo import toy

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

UNIT = 64  # tokens of a chunk, whose keys and values are reused as a whole
QUESTIONS = [
    "Tell me of the sea, and of the ships that sail on it, in a few words.",
    "Which of them is the fastest, and which one is the largest of all?",
    "Who built it?",
    "And where is it now, so many years after it was built, and who sails it?",
]
HOW = dict(temperature=0.9, top_p=0.95)


@pytest.fixture(scope="module")
def model():
    model, tokenizer = toy()
    return model.double(), tokenizer


@pytest.fixture(scope="module")
def port(model):
    options = dict(tokenizer=model[1], max_slots=4, max_tokens=700, prefill_chunk=UNIT, budget=8)
    with served(model[0], keys=("one", "two"), **options) as (port, _):
        yield port


def chat_completion(port, messages, seed, key):
    body = dict(model=NAME, messages=messages, max_tokens=20, seed=seed, **HOW)
    status, answer = call(port, "/v1/chat/completions", body, key)
    assert status == 200, answer
    usage = answer["usage"]
    text = answer["choices"][0]["message"]["content"]
    return text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def streamed_chat(port, messages, seed, key):
    more = {"stream_options": {"include_usage": True}}
    body = dict(model=NAME, messages=messages, max_tokens=20, seed=seed, **HOW) | more
    *parts, last = events(port, "/v1/chat/completions", body, key)
    text = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
    usage = last["usage"]
    return text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def response(port, messages, seed, key):
    body = dict(model=NAME, input=messages, max_output_tokens=20, seed=seed, **HOW)
    status, answer = call(port, "/v1/responses", body, key)
    assert status == 200, answer
    usage = answer["usage"]
    text = answer["output"][0]["content"][0]["text"]
    return text, usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("ask", [chat_completion, streamed_chat, response])
def test_a_turn_reads_only_what_is_new(port, model, ask):
    plain = csd.Engine(model[0], tokenizer=model[1], prefix_cache=False, prefill_chunk=UNIT)
    # no other test has this beginning
    messages = [{"role": "system", "content": f"You answer as {ask.__name__}."}]
    before, reused = [], []
    for seed, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question})
        want = csd.generate(plain, messages, seed=seed, max_new_tokens=20, **HOW)
        text, tokens, cached = ask(port, messages, seed, "one")
        assert (text, tokens) == (want.texts[0], len(want.prompt_ids))
        # the whole units of what the turn before has read; its reply was not a prompt
        pairs = zip(before, want.prompt_ids, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        assert cached == min(same, tokens - 1) // UNIT * UNIT
        reused.append(cached)
        before = want.prompt_ids
        if seed:
            assert ask(port, messages, seed, "two") == (text, tokens, 0 if seed == 1 else cached)
        messages.append({"role": "assistant", "content": text})
    assert reused[0] == 0 and reused[-1] >= 2 * UNIT and reused == sorted(set(reused))
