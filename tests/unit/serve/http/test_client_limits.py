"""Values of clients that would take long to read, that no reader takes, or that are programs."""

import asyncio
import inspect
import json
import threading
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from helpers.runs.served import CHAT, call, chat

from csd.engine.options import grammar
from csd.serve.http.api import fields
from csd.serve.http.names import SAMPLING

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
RESPONSES = "/v1/responses"
PROGRAM = "{{ (9**30000000) % 7 }}"


@pytest.mark.parametrize("path", [CHATS, "/tokenize"])
def test_a_client_sets_only_names_that_the_template_reads(engine, port, monkeypatch, path):
    transformers = pytest.importorskip("transformers")
    function = transformers.PreTrainedTokenizerBase.apply_chat_template
    names = {*inspect.signature(function).parameters, "messages", "raise_exception", "bos_token"}
    # a template that reads an argument's name does not make it the client's
    reads = "{{ mood }}{% if chat_template or bos_token or documents %}{% endif %}"
    plain = engine.tokenizer.chat_template
    monkeypatch.setattr(engine.tokenizer, "chat_template", plain + reads)
    for name in (*names, "unread"):
        status, answer = call(port, path, chat(chat_template_kwargs={name: PROGRAM}))
        assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs"), name
        assert answer["error"]["message"].endswith("chat template reads mood")
    counts = []
    for value in ("", "calm"):
        status, answer = call(port, path, chat(seed=1, chat_template_kwargs={"mood": value}))
        counts.append(answer["count"] if path == "/tokenize" else answer["usage"]["prompt_tokens"])
    assert counts[1] - counts[0] == len("calm")


def test_named_templates_and_tags_of_transformers_are_read():
    from csd.serve.http.checks import read_names

    named = {
        "default": "{% generation %}{{ a }}{% endgeneration %}{% set b = 1 %}{{ b }}",
        "tool_use": "{% for x in tools %}{% if c %}{% break %}{% endif %}{% endfor %}",
    }
    assert read_names(SimpleNamespace(chat_template=named)) == {"a", "c", "tools"}
    assert read_names(SimpleNamespace(chat_template="{% if %}")) == set()


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


# JSON that Python reads as numbers beyond floats, as no text, or as deeper than its stack allows
ODD = [
    10**400,
    -(10**400),
    float("inf"),
    float("nan"),
    "\ud800",
    "x" * 9000,
    {"5": 10**400},
    {"5": float("-inf"), "6": []},
    {"a": nested(300)},
    [10**400],
    [[10**400]],
    nested(300),
    {"type": "json_schema", "json_schema": {"schema": {"const": nested(300)}}},
    {"type": "json_schema", "json_schema": {"schema": {"minimum": 10**400}}},
    [{"role": "user", "content": nested(300)}],
    [{"role": 10**400, "content": "x"}],
    [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 5000}}]}],
]


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", [CHATS, TEXTS, RESPONSES, "/tokenize", "/detokenize"])
def test_no_value_of_any_field_is_an_error_of_the_server(port, path, half):
    """All pairs in two halves: the first has an option's pair by one of the paths that read it."""
    own = ["messages", "prompt", "tokens", "tools", "chat_template_kwargs", "model", "logprobs"]
    own += ["top_logprobs", "stream_options", "echo", "user", "none"]
    base = (chat() if path == CHATS else {"prompt": "ab"}) | {"max_tokens": 2}
    if path == RESPONSES:
        base = {"input": "ab", "max_output_tokens": 2}
        # the others are read as those of a chat
        own = [*fields.RESPONSES, "seed", "metadata", "store", "none"]
    pairs = [(name, value) for name in own for value in ODD] if half == 0 else []
    if path != RESPONSES:
        options = [(name, value) for name in SAMPLING for value in ODD]
        # that of /v1/completions is the other one's complement; the last two paths read none
        first = {CHATS: options[::2], TEXTS: options[1::2]}.get(path, [])
        pairs += [pair for pair in options if pair not in first] if half else first
    for name, value in pairs:
        status, answer = call(port, path, base | {name: value})
        assert status in (200, 400, 404), (name, str(value)[:50], answer)
    # a body that is nested more deeply than Python's stack
    status, answer = call(port, path, b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}")
    assert status == 400, answer


def schema(inside):
    return {"type": "json_schema", "json_schema": {"schema": inside}}


LONG = [
    ("messages", CHAT * 1025, "at most 1024 messages"),
    ("messages", [{"role": "user", "content": "x" * (1 << 21)}], "at most 1048576 characters"),
    ("tools", [{"a": ["x"] * (1 << 20)}], "at most 1048576 characters"),
    ("chat_template_kwargs", {"x": "y" * (1 << 21)}, "at most 1048576 characters"),
    ("response_format", schema({"enum": [f"v{i}" for i in range(200_000)]}), "at most 65536"),
    ("response_format", schema({"anyOf": [{}] * 5000}), "at most 4096 values"),
    ("regex", "a|" * (1 << 16), "at most 65536 characters"),
    ("grammar", "start: " + "a" * (1 << 17), "at most 65536 characters"),
    ("bad_words", ["a"] * 8000, "at most 1024 strings"),
    ("stop", ["a"] * 8000, "at most 1024 strings"),
    ("stop", "a" * (1 << 17), "at most 65536 characters"),
    ("allowed_token_ids", [5] * 8000, "the size of the vocabulary"),
    ("logit_bias", {str(i): 1 for i in range(8000)}, "the size of the vocabulary"),
]


@pytest.mark.parametrize(("name", "value", "text"), LONG, ids=[f"{x[0]}-{x[2]}" for x in LONG])
def test_a_value_beyond_its_size_is_refused_before_it_is_read(engine, name, value, text):
    from csd.serve.http import Limits
    from csd.serve.http.checks import check_sizes
    from csd.serve.http.errors import Refused

    with pytest.raises(Refused, match=text) as refused:
        check_sizes(chat() | {name: value}, Limits(), 400, 96)
    assert refused.value.param == name and refused.value.status == 400


def test_detokenize_and_tokenize_have_limits(port, server):
    most = server[1].limits.ids
    object.__setattr__(server[1].limits, "ids", 50)
    try:
        assert call(port, "/detokenize", {"tokens": [5] * 50})[0] == 200
        status, answer = call(port, "/detokenize", {"tokens": [5] * 51})
        assert status == 400 and "at most 50 token ids" in answer["error"]["message"]
    finally:
        object.__setattr__(server[1].limits, "ids", most)


def test_what_is_being_read_is_counted(port, server, monkeypatch):
    """Also in /health, which shows an idle server otherwise."""
    reads, goes_on = threading.Event(), threading.Event()
    plain = server[1].submit

    def slow(*args):
        reads.set()
        assert goes_on.wait(30)
        return plain(*args)

    monkeypatch.setattr(server[1], "submit", slow)
    thread = threading.Thread(target=call, args=(port, TEXTS, {"prompt": "ab", "max_tokens": 2}))
    thread.start()
    assert reads.wait(30)
    for path in ("/health", "/stats"):
        found = call(port, path)[1]
        assert (found["reading"], found["answering"]) == (1, 1), path
    assert "\ncsd_reading 1\n" in call(port, "/metrics")[1]
    goes_on.set()
    thread.join()
    assert call(port, "/health")[1] == {"status": "ok", "answering": 0, "reading": 0}


def test_a_client_has_its_share_of_the_readers():
    """However many bodies it sends, and also once it has left."""
    from csd.serve.http.clients import Readers
    from csd.serve.http.errors import Refused

    async def attacked():
        readers, goes_on, undone = Readers(3, 2, 0.5), threading.Event(), []

        def forever():
            assert goes_on.wait(30)
            return "late"

        many = [
            asyncio.ensure_future(readers.run("a", 9, forever, undone.append)) for _ in range(200)
        ]
        await asyncio.sleep(0.01)
        for task in many[:50]:
            task.cancel()
        for i in range(20):
            assert await readers.run("b", 1, lambda i=i: i) == i
        ends = await asyncio.gather(*many, return_exceptions=True)
        assert sum(isinstance(end, asyncio.CancelledError) for end in ends) == 50
        refused = [end for end in ends if isinstance(end, Refused)]
        assert len(refused) == 150 and {end.status for end in refused} == {503}
        assert readers.open == 0 and await readers.run("b", 1, lambda: 7) == 7
        goes_on.set()
        # of one client, small bodies come first
        order = []
        works = [readers.run("a", size, lambda size=size: order.append(size)) for size in range(9)]
        await asyncio.gather(*reversed(works))
        assert order[-1] >= 7
        # waits for the threads, whose results nothing waits for
        readers._pool.shutdown()
        assert undone == ["late"] * 2

    asyncio.run(attacked())


@pytest.mark.skipif(find_spec("llguidance") is None, reason="needs llguidance")
def test_a_grammar_beyond_llguidances_limits_is_an_error_not_a_short_text(port, monkeypatch):
    bad = [
        {"response_format": schema({"type": "integer", "multipleOf": 999999937})},
        {
            "response_format": schema(
                {"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}b.*$"} for i in range(30)]}
            )
        },
        # begins, and then needs more states of the lexer than it may have
        {"regex": "[a-z]{200}"},
    ]
    monkeypatch.setattr(grammar, "LEXER_STATES", 50)
    for more in bad:
        body = {"prompt": "ab", "max_tokens": 200, "seed": 1, "ignore_eos": True} | more
        status, answer = call(port, TEXTS, body)
        assert status == 400 and answer["error"]["param"] in more, answer


def test_work_that_ends_with_its_time_limit_is_refused():
    """On a busy machine both happen before the loop sees either."""
    import time

    from csd.serve.http.clients import Readers
    from csd.serve.http.errors import Refused

    async def late():
        readers = Readers(1, 1, 0.02)
        reading = asyncio.ensure_future(readers.run("one", 1, lambda: time.sleep(0.05)))
        await asyncio.sleep(0.01)
        time.sleep(0.2)
        try:
            await reading
        finally:
            readers.close()

    with pytest.raises(Refused) as refused:
        asyncio.run(late())
    assert refused.value.status == 503 and refused.value.code == "reading_too_long"
