"""Fields of clients that have no effect, names of the model, and errors in the names of fields."""

import re

import pytest
from helpers.runs.served import CHAT, NAME, call, chat, events, served

import csd
from csd.serve.http.api import fields
from csd.serve.http.api import fields as unsupported
from csd.serve.http.api.request import read_chat, read_completion
from csd.serve.http.names import SAMPLING

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
NOTHING = {
    CHATS: unsupported.NOTHING_IN_CHAT | {"reasoning_effort": ("medium",)},
    TEXTS: unsupported.NOTHING_IN_COMPLETIONS,
}
KNOWN = {CHATS: {*SAMPLING, *fields.CHAT}, TEXTS: {*SAMPLING, *fields.COMPLETIONS}}


def body(path, **more):
    return (chat() if path == CHATS else {"prompt": "Once", "max_tokens": 9}) | {"seed": 4} | more


def refused(port, path, **more):
    status, answer = call(port, path, body(path, **more))
    assert status == 400, answer
    return answer["error"]["param"], answer["error"]["message"]


@pytest.mark.parametrize("path", NOTHING)
def test_a_value_that_asks_for_nothing_is_accepted(engine, port, path):
    """Each is read as its absence; the server takes all of them, several in one body."""
    asked = [(name, value) for name, values in NOTHING[path].items() for value in values]
    asked += [(name, "x") for name in unsupported.IGNORED]
    needed = {"messages", "prompt", "max_tokens", "temperature", "seed"}
    asked += [(name, None) for name in {*NOTHING[path], *KNOWN[path], "model"} - needed]
    asked.remove(("seed", -1))
    read, bodies = {CHATS: read_chat, TEXTS: read_completion}[path], []
    without = read(body(path), engine.tokenizer)
    for name, value in asked:
        assert read(body(path, **{name: value}), engine.tokenizer) == without, (name, value)
        free = next((more for more in bodies if name not in more), None)
        if free is None:
            bodies.append(free := {})
        free[name] = value
    # these are the engine's
    bodies += [{name: []} for name in ("stop", "stop_token_ids", "bad_words", "suppress_tokens")]
    bodies += [{name: 0} for name in ("min_tokens", "min_p", "no_repeat_ngram_size")]
    bodies += [{"first_sample": 0}, {"top_p": 1}, {"top_k": -1}, {"n": 1}, {"model": ""}]
    bodies.append({"repetition_penalty": 1})
    want = call(port, path, body(path))[1]["choices"]
    for more in bodies:
        status, answer = call(port, path, body(path, **more))
        assert (status, answer.get("choices")) == (200, want), (more, answer)


@pytest.mark.parametrize("path", NOTHING)
def test_another_value_of_such_a_field_is_refused(port, path):
    for name in NOTHING[path].keys() - KNOWN[path]:
        for value in ({"x": 1}, 7):
            param, message = refused(port, path, **{name: value})
            assert param == name and message.startswith(f"{name} is not supported, got {value}")
    # false equals 0 and true equals 1
    assert refused(port, path, best_of=True)[0] == "best_of"
    assert refused(port, path, use_beam_search=0)[0] == "use_beam_search"


def test_every_field_of_openai_is_decided_on():
    openai = pytest.importorskip("openai")
    of_path = {
        CHATS: openai.types.chat.completion_create_params.CompletionCreateParamsStreaming,
        TEXTS: openai.types.completion_create_params.CompletionCreateParamsStreaming,
    }
    for path, kind in of_path.items():
        decided = {*NOTHING[path], *KNOWN[path], *fields.COMMON, *unsupported.IGNORED}
        # audio, a check of contents, and a search, also by an empty object
        assert kind.__annotations__.keys() - decided <= {
            "audio",
            "moderation",
            "web_search_options",
        }


def test_stream_options_that_ask_for_nothing(port):
    nothing = {name: value for name, (value,) in unsupported.NOTHING_IN_STREAM_OPTIONS.items()} | {
        "other": None
    }
    status, _ = call(port, CHATS, body(CHATS, stream_options=nothing))
    assert status == 200
    assert "usage" not in events(port, CHATS, body(CHATS, stream_options=nothing))[-1]


def test_a_seed_of_minus_one_is_none(port):
    seeds = {call(port, TEXTS, body(TEXTS, seed=-1))[1]["csd"]["seed"] for _ in range(3)}
    assert len(seeds) == 3 and -1 not in seeds


def test_reasoning_effort_is_for_a_template_that_reads_it(engine, port, monkeypatch):
    assert refused(port, CHATS, reasoning_effort="high")[0] == "reasoning_effort"
    plain = engine.tokenizer.chat_template
    monkeypatch.setattr(engine.tokenizer, "chat_template", plain + "{{ reasoning_effort }}")
    lengths = [
        call(port, CHATS, body(CHATS, reasoning_effort=effort))[1]["usage"]["prompt_tokens"]
        for effort in ("low", "medium")
    ]
    assert lengths[1] - lengths[0] == len("medium") - len("low")


ERRORS = [
    (CHATS, {"max_tokens": 401}, "max_tokens must be at most 400, the context of the server"),
    (
        CHATS,
        {"max_tokens": None, "max_completion_tokens": 401},
        "max_completion_tokens must be at most 400, the context of the server, got 401",
    ),
    (TEXTS, {"max_tokens": 398}, "the prompt has 4 tokens, which with max_tokens=398 "),
    (CHATS, {"max_tokens": None, "max_completion_tokens": 395}, "with max_completion_tokens=395"),
    (CHATS, {"max_tokens": None, "min_tokens": 500}, "min_tokens"),
    (CHATS, {"n": 21}, "n must be at most 20 (--max-n of the server), got 21"),
    (
        TEXTS,
        {"n": 11, "prompt": ["a", "b"]},
        "n times the number of prompts must be at most 20 (--max-n of the server), got 11 times 2",
    ),
    (CHATS, {"best_of": 4}, "got 4; n is the number of choices"),
    (TEXTS, {"best_of": 4}, "got 4; n is the number of choices"),
    (CHATS, {"prompt_logprobs": 1}, "; echo with logprobs in /v1/completions returns those of the"),
    (CHATS, {"guided_json": {}}, "; use response_format"),
    (CHATS, {"guided_regex": "a+"}, "; use regex"),
    (TEXTS, {"guided_choice": ["a"]}, "; use regex, such as"),
    (TEXTS, {"guided_grammar": "x"}, "; use grammar"),
    (TEXTS, {"structured_outputs": {"regex": "a"}}, "; use response_format, regex or grammar"),
    (CHATS, {"json_schema": {}}, "; did you mean response_format?"),
    (CHATS, {"max_new_tokens": 5}, "; did you mean max_tokens?"),
    (TEXTS, {"num_samples": 5}, "; did you mean n?"),
    (CHATS, {"thinking_budget": 5}, "; did you mean max_thinking_tokens?"),
    (CHATS, {"chat_template": "x"}, "; did you mean chat_template_kwargs?"),
    (
        CHATS,
        {"tools": [{"type": "function"}]},
        "chat template does not read tools, so the model would not see",
    ),
    (CHATS, {"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs must not have"),
]


@pytest.mark.parametrize(("path", "given", "text"), ERRORS, ids=[str(e[1]) for e in ERRORS])
def test_an_error_has_the_names_of_fields(port, path, given, text):
    param, message = refused(port, path, **given)
    assert text in message
    assert param in given or param in ("messages", "prompt")
    options = set(SAMPLING.values()) - set(SAMPLING) - set(given)
    assert not options & set(re.findall(r"\w+", message.split(", got")[0])), message
    assert "empty prompt" not in message and "csd." not in message


@pytest.mark.parametrize("path", NOTHING)
def test_the_field_that_an_error_names_instead_is_served(port, path):
    pytest.importorskip("llguidance")
    schema = {"name": "one", "schema": {"const": 7}}
    for given, want in (
        ({"response_format": {"type": "json_schema", "json_schema": schema}}, {"7"}),
        ({"regex": "yes|no"}, {"yes", "no"}),
        ({"grammar": 'start: "yes" | "no"'}, {"yes", "no"}),
    ):
        status, answer = call(port, path, body(path, **given))
        assert status == 200, answer
        (choice,) = answer["choices"]
        text = choice["text"] if path == TEXTS else choice["message"]["content"]
        assert text in want and choice["finish_reason"] == "stop"


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
BAD_MESSAGES = [
    ([{"role": "user", "content": [IMAGE]}], "messages[0].content[0]"),
    ([*CHAT, {"role": "user"}], "messages[1].content"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": 5, "content": "x"}], "messages[0].role"),
    ([{"role": "bogus", "content": "x"}], "messages[0].role"),
    # not token ids, and not a list of prompts
    ([5, 6], "messages[0]"),
    (["hi"], "messages[0]"),
    ([*CHAT, CHAT], "messages[1]"),
]


@pytest.mark.parametrize(("messages", "place"), BAD_MESSAGES, ids=[p for _, p in BAD_MESSAGES])
def test_a_bad_message_is_named_by_its_place(port, messages, place):
    for path in (CHATS, "/tokenize"):
        status, answer = call(port, path, {"messages": messages})
        assert (status, answer["error"]["param"]) == (400, "messages"), answer
        assert re.search(re.escape(place) + r"(?![.\[\w])", answer["error"]["message"]), answer
        assert "prompt" not in answer["error"]["message"]


USERS = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
RAISES = USERS.replace("{% endif %}", "{% else %}{{ raise_exception('no such role') }}{% endif %}")


@pytest.mark.parametrize(("template", "text"), [(USERS, "'tool'"), (RAISES, "no such role")])
def test_a_role_that_the_template_does_not_render(engine, port, monkeypatch, template, text):
    messages = [*CHAT, {"role": "tool", "content": "x"}]
    assert call(port, CHATS, chat(messages=messages))[0] == 200
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    param, message = refused(port, CHATS, messages=messages)
    assert param == "messages" and message.startswith("messages ") and text in message


def test_what_the_sampler_can_do_is_accepted(port):
    more = dict(temperature=3, presence_penalty=3, stop=[*"abcdefghij"])
    assert call(port, CHATS, body(CHATS, **more))[0] == 200


def test_the_model_has_the_name_that_it_was_given(toy_folder):
    with served(toy_folder, max_tokens=100, budget=4) as (port, _):
        for name in (NAME, toy_folder, None, ""):
            status, answer = call(port, TEXTS, {"prompt": "a", "model": name, "max_tokens": 2})
            assert (status, answer["model"]) == (200, NAME)
            if name:
                assert call(port, f"/v1/models/{name}")[1]["id"] == NAME
        for name in (toy_folder + "x", "other", 5, False, [NAME]):
            status, answer = call(port, TEXTS, {"prompt": "a", "model": name})
            assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert call(port, "/version") == (200, {"version": csd.__version__})
