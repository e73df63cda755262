"""The paths of a server, by clients of the standard library."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
import torch
from served import NAME, call, events, opened, served

import csd
from csd.models.demo import toy

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

CHAT = [{"role": "user", "content": "Say 1."}]


@pytest.fixture(scope="module")
def model():
    """In float64: samples are the same under any load. Some letters end an answer."""
    model, tokenizer = toy()
    model.generation_config.eos_token_id = [1, 40, 41]
    model._csd_tokenizer = tokenizer
    return model.double()


@pytest.fixture(scope="module")
def engine(model):
    return csd.Engine(model, tokenizer=model._csd_tokenizer, max_slots=16)


@pytest.fixture(scope="module")
def server(engine):
    from csd.integrations.serve import Limits

    limits = Limits(body=20_000, choices=20)
    with served(csd.AsyncEngine(engine, max_tokens=400, budget=8), limits=limits) as found:
        yield found


@pytest.fixture(scope="module")
def port(server):
    return server[0]


def drawn(engine, prompt, **options):
    return csd.generate(engine, prompt, **options)


def chat(**fields):
    return {"model": NAME, "messages": CHAT, "max_tokens": 20, "temperature": 0.8} | fields


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


WRONG = [
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"logit_bias": {"x": 3}}, "logit_bias"),
    ({"logit_bias": {"500": 3}}, "logit_bias"),
    ({"presence_penalty": "much"}, "presence_penalty"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"logits_processor": "f"}, "logits_processor"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"typical_p": 0.4}, "typical_p"),
    ({"max_token": 5}, "max_token"),
    ({"n": 21}, "n"),
    ({"n": 0}, "n"),
    ({"n": "many"}, "n"),
    ({"max_tokens": 4000}, "max_tokens"),
    ({"max_tokens": 395}, "messages"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"seed": 1.5}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"stream": 1}, "stream"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
]


@pytest.mark.parametrize(("fields", "name"), WRONG, ids=[str(f) for f, _ in WRONG])
def test_a_field_that_is_not_served_is_named(port, fields, name):
    body = chat(**fields)
    if "max_completion_tokens" not in fields and "max_tokens" not in fields:
        body.pop("max_tokens")
    status, answer = call(port, "/v1/chat/completions", body)
    assert status == 400, answer
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == name, answer
    assert name in answer["error"]["message"] or name == "messages"


def test_penalties_biases_and_bans(port, engine):
    """Beside requests that ask for none, and for others."""
    asked = [
        {}, {"frequency_penalty": 1.5}, {"presence_penalty": 2.0}, {"logit_bias": {"40": 6.0}},
        {"bad_words": ["e", "ab"]}, {"allowed_token_ids": [20, 30, 40, 50]}, {"min_tokens": 9},
        {"no_repeat_ngram_size": 2}, {"repetition_penalty": 1.3},
    ]  # fmt: skip
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
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    kind = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = chat(seed=1, max_tokens=300, response_format=kind, temperature=0.3)
    status, answer = call(port, "/v1/chat/completions", body)
    if find_spec("llguidance") is None:
        assert (status, answer["error"]["param"]) == (400, "response_format")
        assert "csd[grammar]" in answer["error"]["message"]
        return
    assert json.loads(answer["choices"][0]["message"]["content"])["a"] in (True, False)


def test_fields_that_change_nothing_are_ignored(port):
    same = dict(
        user="me", metadata={"a": 1}, store=True, presence_penalty=0, frequency_penalty=0,
        logit_bias={}, response_format={"type": "text"}, tool_choice="none", tools=None,
        top_k=-1, logprobs=False,
    )  # fmt: skip
    _, plain = call(port, "/v1/chat/completions", chat(seed=4))
    status, answer = call(port, "/v1/chat/completions", chat(seed=4, **same))
    assert status == 200 and answer["choices"] == plain["choices"]


def test_what_is_no_request(port):
    for body in (b"", b"{", b"[]", b"\xff", b"[" * 5000):
        status, answer = call(port, "/v1/completions", body)
        assert status == 400 and "JSON" in answer["error"]["message"]
    status, answer = call(port, "/v1/completions", {"prompt": "x" * 30_000})
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    status, answer = call(port, "/v1/chat/completions", chat(model="gpt"))
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert call(port, "/v1/nothing")[0] == 404
    assert call(port, "/v1/completions")[0] == 405
    for prompt in (None, 5, [], [[]], {"a": 1}, ["a", 5], [97, 10**9]):
        status, answer = call(port, "/v1/completions", {"prompt": prompt})
        assert (status, answer["error"]["param"]) == (400, "prompt"), (prompt, answer)


def test_the_other_paths(port, server):
    assert call(port, "/health") == (200, {"status": "ok"})
    _, listed = call(port, "/v1/models")
    assert [m["id"] for m in listed["data"]] == [NAME]
    assert call(port, f"/v1/models/{NAME}")[1] == listed["data"][0]
    assert call(port, "/v1/models/other")[0] == 404
    assert listed["data"][0]["max_model_len"] == 400
    _, found = call(port, "/tokenize", {"prompt": "ab", "return_token_strs": True})
    assert (found["count"], found["token_strs"]) == (2, ["a", "b"])
    assert call(port, "/detokenize", {"tokens": found["tokens"]})[1] == {"prompt": "ab"}
    _, of_chat = call(port, "/tokenize", {"messages": CHAT})
    assert of_chat["count"] == len("user: Say 1.\nassistant: ")
    assert call(port, "/tokenizer_info")[1]["eos_token"] == "<end>"
    status, text = call(port, "/metrics")
    assert status == 200
    values = dict(
        line.split(" ") for line in text.splitlines() if line and not line.startswith("#")
    )
    assert int(values["csd_tokens_total"]) > 0 and values["csd_slots"] == "0"
    assert int(values['csd_responses_total{status="200"}']) > 0
    _, stats = call(port, "/stats")
    assert stats["free_pages"] == stats["pages"] and stats["answering"] == 0
    assert "<title>csd serve</title>" in call(port, "/")[1]
    assert call(port, "/update_weights", {"path": "x"})[0] == 404


def test_a_prompt_over_the_context_is_nobody_elses_concern(port):
    stream = opened(port, "/v1/completions", {"prompt": "ab", "max_tokens": 300, "seed": 1,
                                              "ignore_eos": True, "stream": True})  # fmt: skip
    status, answer = call(port, "/v1/completions", {"prompt": "x" * 500, "max_tokens": 3})
    assert status == 400 and "context of 400" in answer["error"]["message"]
    assert stream.read().decode().endswith("[DONE]\n\n")


def test_a_client_that_leaves_ends_its_request(port, server):
    _, state = server
    counters = state.engine.counters
    before = counters.cancelled + counters.withdrawn
    for stream in (True, False):
        body = json.dumps({"prompt": "ab", "max_tokens": 390, "n": 8, "stream": stream,
                           "ignore_eos": True}).encode()  # fmt: skip
        client = socket.create_connection(("127.0.0.1", port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        if stream:
            client.recv(100)
        else:
            time.sleep(0.05)
        client.close()
    until = time.monotonic() + 20
    while counters.cancelled + counters.withdrawn < before + 2 or state.open:
        assert time.monotonic() < until, (counters, state.open)
        time.sleep(0.01)


def test_keys(engine):
    with served(csd.AsyncEngine(engine, max_tokens=300), keys=("one", "two")) as (port, state):
        body = {"prompt": "abc", "max_tokens": 5, "seed": 1}
        for key in (None, "three", "", "onetwo"):
            for path in ("/v1/completions", "/tokenize"):
                status, answer = call(port, path, body, key)
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert call(port, "/v1/models", key=key)[0] == 401
            assert call(port, "/metrics", key=key)[0] == 401
        texts = {call(port, "/v1/completions", body, key)[1]["choices"][0]["text"]
                 for key in ("one", "two")}  # fmt: skip
        assert len(texts) == 1
        assert call(port, "/health")[0] == 200
        # of one key, equal prompts are a group
        long = body | {"max_tokens": 200, "ignore_eos": True, "stream": True}
        streams = []
        for key in ("one", "one", "two"):
            streams.append(opened(port, "/v1/completions", long, key))
            streams[-1].read(10)
        counters = state.engine.counters
        assert counters.shared_prompt_tokens == 3
        for stream in streams:
            stream.read()


def test_weights_come_from_the_named_folder_alone(tmp_path):
    tokenizer = toy()[1]
    for name, seed in (("weights/a", 0), ("weights/b", 1), ("outside", 2)):
        for part in (toy(seed)[0], tokenizer):
            part.save_pretrained(tmp_path / name)
    (tmp_path / "weights/link").symlink_to(tmp_path / "outside")
    service = csd.AsyncEngine(str(tmp_path / "weights/a"), max_tokens=200, budget=4)
    with served(service, keys=("first", "second"), weights_folder=str(tmp_path / "weights")) as (
        port, _,
    ):  # fmt: skip
        body = {"prompt": "abc", "max_tokens": 12, "seed": 1}
        old = call(port, "/v1/completions", body, "second")[1]
        for path in ("../outside", "link", "none", "", "/", "a\0b", 5):
            status, answer = call(port, "/update_weights", {"path": path}, "first")
            assert (status, answer["error"]["param"]) == (400, "path")
        assert call(port, "/update_weights", {"path": "b"}, "second")[0] == 403
        status, answer = call(port, "/update_weights", {"path": "b"}, "first")
        assert (status, answer["weights_version"]) == (200, 1)
        new = call(port, "/v1/completions", body, "second")[1]
        assert new["choices"][0]["text"] != old["choices"][0]["text"]
        assert new["csd"]["weights_version"] == 1
        assert new["system_fingerprint"] == answer["system_fingerprint"]
        assert new["system_fingerprint"] != old["system_fingerprint"]
