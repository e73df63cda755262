"""Answers of a server, by clients of the standard library."""

import json
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
import torch
from helpers.runs.served import CHAT, NAME, call, chat, events

import csd
from csd.utils.lazy import pip_install

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


def drawn(engine, prompt, **options):
    return csd.generate(engine, prompt, **options)


def test_n_is_a_group_and_choice_i_is_sample_i(port, engine):
    status, answer = call(port, "/v1/chat/completions", chat(n=4, seed=7, top_p=0.9))
    want = drawn(engine, CHAT, num_samples=4, seed=7, max_new_tokens=20, temperature=0.8, top_p=0.9)
    assert status == 200 and answer["object"] == "chat.completion" and answer["model"] == NAME
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert [c["message"]["content"] for c in answer["choices"]] == want.texts
    assert [c["finish_reason"] for c in answer["choices"]] == want.finish_reasons
    assert answer["usage"] == {
        "prompt_tokens": len(want.prompt_ids),
        "completion_tokens": sum(map(len, want.tokens)),
        "total_tokens": len(want.prompt_ids) + sum(map(len, want.tokens)),
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer["csd"]["seed"] == 7 and answer["csd"]["weights_version"] == 0
    assert answer["csd"]["tokens_per_step"] >= 1
    assert answer["system_fingerprint"].endswith("-float64-rounding")


def test_a_stream_is_the_answer_in_parts(port):
    body = chat(n=3, seed=2, logprobs=True, top_logprobs=2, return_token_ids=True)
    _, whole = call(port, "/v1/chat/completions", body)
    lines = events(port, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    assert all(line["object"] == "chat.completion.chunk" for line in lines)
    for choice in whole["choices"]:
        parts = [c for line in lines for c in line["choices"] if c["index"] == choice["index"]]
        assert parts[0]["delta"]["role"] == "assistant"
        text = "".join(p["delta"].get("content", "") for p in parts)
        assert text == choice["message"]["content"]
        ids = [t for p in parts for t in p.get("token_ids", ())]
        assert ids == choice["token_ids"]
        content = [e for p in parts if p["logprobs"] for e in p["logprobs"]["content"]]
        assert [e["token"] for e in content] == [e["token"] for e in choice["logprobs"]["content"]]
        assert [p["finish_reason"] for p in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
    assert lines[-1]["choices"] == [] and lines[-1]["usage"] == whole["usage"]
    assert lines[-1]["csd"]["seed"] == 2


def test_without_usage_every_event_has_a_choice(port):
    lines = events(port, "/v1/chat/completions", chat(n=2, seed=2))
    assert all(line["choices"] for line in lines) and "usage" not in lines[-1]
    assert lines[-1]["csd"]["seed"] == 2


def test_log_probabilities_are_the_models_own(port, engine):
    body = chat(n=2, seed=3, logprobs=True, top_logprobs=3, temperature=0.5)
    _, answer = call(port, "/v1/chat/completions", body)
    want = drawn(engine, CHAT, num_samples=2, seed=3, max_new_tokens=20, temperature=0.5)
    for choice, sample in zip(answer["choices"], want, strict=True):
        content = choice["logprobs"]["content"]
        assert [e["logprob"] for e in content] == pytest.approx(sample.raw_logprobs)
        assert choice["csd"]["logprobs"] == pytest.approx(sample.logprobs)
        shown = "".join(e["token"] for e in content)
        assert shown.replace("<pad>", "").replace("<end>", "").startswith(sample.text)
        for entry in content:
            top = [e["logprob"] for e in entry["top_logprobs"]]
            assert len(top) == 3 and top == sorted(top, reverse=True)
            assert entry["logprob"] <= top[0] + 1e-9
            assert bytes(entry["bytes"]).decode() == entry["token"]


def test_completions_of_texts_and_of_ids(port, engine, model):
    tokenizer = model._csd_tokenizer
    ids = tokenizer("Once")["input_ids"]
    body = {"max_tokens": 12, "seed": 5, "n": 2, "return_token_ids": True}
    _, of_text = call(port, "/v1/completions", body | {"prompt": "Once"})
    _, of_ids = call(port, "/v1/completions", body | {"prompt": ids})
    want = drawn(engine, ids, num_samples=2, seed=5, max_new_tokens=12)
    assert [c["text"] for c in of_ids["choices"]] == want.texts
    assert [c["token_ids"] for c in of_ids["choices"]] == want.tokens
    assert [c["prompt_token_ids"] for c in of_ids["choices"]] == [ids, ids]
    assert of_text["choices"] == of_ids["choices"]
    _, short = call(port, "/v1/completions", {"prompt": "Once", "ignore_eos": True})
    assert short["usage"]["completion_tokens"] == 16


def test_several_prompts_and_a_prompt_twice(port, engine):
    prompts = ["a b", "c", "a b"]
    body = {"prompt": prompts, "max_tokens": 9, "seed": 1, "n": 2}
    _, answer = call(port, "/v1/completions", body)
    assert [c["index"] for c in answer["choices"]] == [*range(6)]
    want = drawn(engine, prompts, num_samples=2, seed=1, max_new_tokens=9)
    texts = [t for out in want for t in out.texts]
    assert [c["text"] for c in answer["choices"]] == texts
    found = dict.fromkeys(range(6), "")
    for line in events(port, "/v1/completions", body):
        for choice in line["choices"]:
            found[choice["index"]] += choice["text"]
    assert [*found.values()] == texts


def test_echo_scores_the_prompt(port, engine, model):
    """The request is lm-evaluation-harness's."""
    ids = [20, 30, 45, 33, 20, 12]
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    _, answer = call(port, "/v1/completions", body)
    choice = answer["choices"][0]
    with torch.no_grad():
        probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    want = [float(probs[i, t]) for i, t in enumerate(ids[1:])]
    found = choice["logprobs"]["token_logprobs"]
    assert found[0] is None and found[1:-1] == pytest.approx(want)
    assert found[-1] == pytest.approx(float(probs[-1].max()))
    likeliest = choice["logprobs"]["top_logprobs"]
    assert likeliest[0] is None
    for i in range(5):
        assert max(likeliest[i + 1].values()) == pytest.approx(float(probs[i].max()))
    text = model._csd_tokenizer.decode(ids)
    assert choice["text"].startswith(text)
    assert choice["logprobs"]["text_offset"][:6] == [*range(6)]
    _, nothing = call(port, "/v1/completions", body | {"max_tokens": 0})
    assert nothing["choices"][0]["text"] == text
    assert nothing["choices"][0]["logprobs"]["token_logprobs"] == found[:-1]
    assert nothing["usage"]["completion_tokens"] == 0


def test_stop_strings_and_templates(port, engine):
    _, free = call(port, "/v1/chat/completions", chat(seed=9, ignore_eos=True))
    text = free["choices"][0]["message"]["content"]
    _, cut = call(port, "/v1/chat/completions", chat(seed=9, ignore_eos=True, stop=text[5:7]))
    choice = cut["choices"][0]
    at = text.index(text[5:7])
    assert (choice["message"]["content"], choice["finish_reason"]) == (text[:at], "stop")
    assert choice["stop_reason"] == text[5:7]
    body = {"messages": [*CHAT, {"role": "assistant", "content": "x"}]}
    status, answer = call(port, "/v1/chat/completions", chat(seed=1) | body)
    assert status == 200 and answer["choices"]


def test_penalties_biases_and_bans(port, engine):
    """Beside requests that ask for none, and for others."""
    asked = [
        {},
        {"frequency_penalty": 1.5},
        {"presence_penalty": 2.0},
        {"logit_bias": {"40": 6.0}},
        {"bad_words": ["e", "ab"]},
        {"allowed_token_ids": [20, 30, 40, 50]},
        {"min_tokens": 9},
        {"no_repeat_ngram_size": 2},
        {"repetition_penalty": 1.3},
    ]
    body = dict(prompt="Once", seed=3, n=2, max_tokens=24)
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = [*pool.map(lambda more: call(port, "/v1/completions", body | more), asked)]
    texts = []
    for more, (status, answer) in zip(asked, answers, strict=True):
        assert status == 200, answer
        names = {"min_tokens": "min_new_tokens"}
        options = {names.get(k, k): v for k, v in more.items()}
        if "logit_bias" in options:
            options["logit_bias"] = {40: 6.0}
        want = drawn(engine, "Once", num_samples=2, seed=3, max_new_tokens=24, **options)
        texts.append([c["text"] for c in answer["choices"]])
        assert texts[-1] == want.texts, more
    assert len({str(x) for x in texts}) > 4


def test_a_schema(port):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    kind = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = chat(seed=1, max_tokens=300, response_format=kind, temperature=0.3)
    status, answer = call(port, "/v1/chat/completions", body)
    if find_spec("llguidance") is None:
        assert (status, answer["error"]["param"]) == (400, "response_format")
        assert pip_install("grammar") in answer["error"]["message"]
        return
    assert json.loads(answer["choices"][0]["message"]["content"])["a"] in (True, False)


def test_a_choice_that_cannot_continue_has_an_error_of_its_own(port, engine):
    """If no choice can, the request has it."""
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "patternProperties": {"^a$": {"type": "integer"}},
        "additionalProperties": False,
    }
    asked = dict(num_samples=6, seed=4, max_new_tokens=150, temperature=1.5)
    want = drawn(engine, CHAT, json_schema=schema, on_error="return", **asked)
    assert {"error", "stop"} <= {*want.finish_reasons}
    kind = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = chat(n=6, seed=4, max_tokens=150, temperature=1.5, response_format=kind)
    status, answer = call(port, "/v1/chat/completions", body)
    assert status == 200
    lines = events(port, "/v1/chat/completions", body)
    for i, (choice, sample) in enumerate(zip(answer["choices"], want, strict=True)):
        parts = [c for line in lines for c in line["choices"] if c["index"] == i]
        assert choice["message"]["content"] == sample.text
        assert "".join(p["delta"].get("content", "") for p in parts) == sample.text
        for end in (choice, parts[-1]):
            assert end["finish_reason"] == sample.finish_reason
            assert ("error" in end) == (sample.error is not None)
            if sample.error is not None:
                assert f"after {len(sample.tokens)} tokens of sample {i}" in end["error"]["message"]
    first = next(s.index for s in want if s.error is not None)
    one = body | {"n": 1, "first_sample": first}
    status, answer = call(port, "/v1/chat/completions", one)
    assert status == 400 and "banned all tokens after" in answer["error"]["message"]
    lines = events(port, "/v1/chat/completions", one)
    assert lines[-1]["error"]["message"] == answer["error"]["message"]
