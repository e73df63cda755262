"""Requests that a server refuses, ignores parts of or ends early, and its other paths."""

import json
import os
import re
import socket
import time
from pathlib import Path

import pytest
from helpers.runs.served import CHAT, NAME, call, chat, opened, served

import csd
from csd.models.demo import toy

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from csd.serve.http.clients import owner_of

WRONG = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"logit_bias": {"x": 3}}, "logit_bias"),
    ({"logit_bias": {"500": 3}}, "logit_bias"),
    # one token by two names
    ({"logit_bias": {"5": 3, "05": 9}}, "logit_bias"),
    ({"presence_penalty": "much"}, "presence_penalty"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": None}}},
        "response_format",
    ),
    # of which the engine learns while it draws
    ({"suppress_tokens": [5], "allowed_token_ids": [5]}, "allowed_token_ids"),
    ({"logits_processor": "f"}, "logits_processor"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"epsilon_cutoff": 0.4}, "epsilon_cutoff"),
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
    # of all prompts that the server has read, nobody knows the number
    assert not re.search(r"prompt \d", answer["error"]["message"])


def test_fields_that_change_nothing_are_ignored(port):
    same = dict(
        user="me",
        metadata={"a": 1},
        store=True,
        presence_penalty=0,
        frequency_penalty=0,
        logit_bias={},
        response_format={"type": "text"},
        tool_choice="none",
        tools=None,
        top_k=-1,
        logprobs=False,
    )
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
    assert call(port, "/health") == (200, {"status": "ok", "answering": 0, "reading": 0})
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
    stream = opened(
        port,
        "/v1/completions",
        {"prompt": "ab", "max_tokens": 300, "seed": 1, "ignore_eos": True, "stream": True},
    )
    status, answer = call(port, "/v1/completions", {"prompt": "x" * 500, "max_tokens": 3})
    assert status == 400 and "context of 400" in answer["error"]["message"]
    assert stream.read().decode().endswith("[DONE]\n\n")


def test_a_client_that_leaves_ends_its_request(port, server):
    _, state = server
    counters = state.engine.counters
    before = counters.cancelled + counters.withdrawn
    for stream in (True, False):
        body = json.dumps(
            {"prompt": "ab", "max_tokens": 390, "n": 8, "stream": stream, "ignore_eos": True}
        ).encode()
        client = socket.create_connection(("127.0.0.1", port))
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
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
        texts = {
            call(port, "/v1/completions", body, key)[1]["choices"][0]["text"]
            for key in ("one", "two")
        }
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


def test_a_prior_learns_from_the_keys_that_opt_in(engine):
    one, two = owner_of(b"one"), owner_of(b"two")
    service = csd.AsyncEngine(engine, max_tokens=300, budget=16, learn_from=[one])
    with served(service, keys=("one", "two")) as (port, _):
        body = {"prompt": "abc", "max_tokens": 20, "seed": 1, "ignore_eos": True}
        texts = {
            call(port, "/v1/completions", body, key)[1]["choices"][0]["text"]
            for key in ("two", "one", "two")
        }
        assert len(texts) == 1 and two not in service.priors
        assert service.priors[one].tokens == 20


BROKEN = {
    "empty": "{",
    "base": '{"peft_type": "LORA", "base_model_name_or_path": "HERE/other/base"}',
}


def test_weights_come_from_the_named_folder_alone(tmp_path):
    tokenizer = toy()[1]
    for name, seed in (("weights/a", 0), ("weights/b", 1), ("outside", 2)):
        for part in (toy(seed)[0], tokenizer):
            part.save_pretrained(tmp_path / name)
    (tmp_path / "weights/link").symlink_to(tmp_path / "outside")
    service = csd.AsyncEngine(str(tmp_path / "weights/a"), max_tokens=200, budget=4)
    with served(service, keys=("first", "second"), weights_folder=str(tmp_path / "weights")) as (
        port,
        _,
    ):
        body = {"prompt": "abc", "max_tokens": 12, "seed": 1}
        old = call(port, "/v1/completions", body, "second")[1]
        for path in ("../outside", "link", "none", "", "/", "a\0b", 5):
            status, answer = call(port, "/update_weights", {"path": path}, "first")
            assert (status, answer["error"]["param"]) == (400, "path")
        # each cannot be loaded, for another reason
        for name, text in BROKEN.items():
            (tmp_path / "weights" / name).mkdir()
            text = text.replace("HERE", str(tmp_path))
            (tmp_path / "weights" / name / "adapter_config.json").write_text(text)
        (tmp_path / "weights/pipe").mkdir()
        os.mkfifo(tmp_path / "weights/pipe/config.json")
        for path in (".", "a/..", "pipe", *BROKEN):
            status, answer = call(port, "/update_weights", {"path": path}, "first")
            assert status == 400, answer
            assert str(tmp_path) not in str(answer) and "/tmp" not in str(answer), answer
        assert call(port, "/update_weights", {"path": "b"}, "second")[0] == 403
        status, answer = call(port, "/update_weights", {"path": "b"}, "first")
        assert (status, answer["weights_version"]) == (200, 1)
        new = call(port, "/v1/completions", body, "second")[1]
        assert new["choices"][0]["text"] != old["choices"][0]["text"]
        assert new["csd"]["weights_version"] == 1
        assert new["system_fingerprint"] == answer["system_fingerprint"]
        assert new["system_fingerprint"] != old["system_fingerprint"]


# texts of errors about a file of this machine, and about values of clients
HIDDEN = [
    "{} has no config.json",
    "[Errno 2] No such file or directory: '{}'",
    "cannot import name 'x' from 'json' ({}/__init__.py)",
    'File "{}/a b/c.py", line 3',
    "file://{}/x, or {}:3",
    "{}",
]
SHOWN = [
    "the schema at /properties/a and /$defs/b banned all tokens",
    "the header must be 'Content-Type: application/json', see https://example.com/tmp/x",
    "1/2/3 and/or a/b",
]


@pytest.mark.parametrize("kind", [OSError, ValueError, TypeError, ImportError, RuntimeError])
def test_errors_show_no_path_of_the_machine(server, tmp_path, monkeypatch, kind):
    """A path that the client has sent itself stays."""
    from csd.serve.http import endpoints

    port, found = server
    monkeypatch.setattr(found, "weights_folder", str(tmp_path / "weights"))
    for path in (tmp_path / "x", tmp_path / "weights/y", tmp_path / "weights", Path(os.__file__)):
        for text in HIDDEN:

            def fails(*_, text=text, path=path):
                raise kind(text.format(path, path))

            monkeypatch.setattr(endpoints, "_tokenizer", fails)
            status, answer = call(port, "/tokenizer_info")
            assert status in (400, 500)
            message = answer["error"]["message"]
            assert str(path.parent) not in message, message
            assert "[path]" in message or "[folder]" in message
            monkeypatch.setattr(endpoints, "_ids_of", fails)
            monkeypatch.setattr(endpoints, "_tokenizer", lambda _: None)
            body = {"prompt": f"see {path}"}
            status, answer = call(port, "/tokenize", body | {"prompt": "none"})
            assert str(path.parent) not in answer["error"]["message"]
            if kind in (ValueError, TypeError) and path.name == "x" and "{}/" not in text:
                message = call(port, "/tokenize", body)[1]["error"]["message"]
                assert str(path) in message, message
    for text in SHOWN:

        def shows(*_, text=text):
            raise ValueError(text)

        monkeypatch.setattr(endpoints, "_tokenizer", shows)
        assert call(port, "/tokenizer_info")[1]["error"]["message"] == text
