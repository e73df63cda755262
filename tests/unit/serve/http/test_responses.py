"""`/v1/responses`: the texts and calls of a chat completion as items, whole and as events."""

import json
from importlib.util import find_spec

import pytest
from helpers.runs.served import CHAT, NAME, call, chat, opened, served

import csd

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

PATH = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
needs_grammars = pytest.mark.skipif(find_spec("llguidance") is None, reason="needs llguidance")

SAY = {
    "type": "function",
    "name": "say",
    "parameters": {
        "type": "object",
        "properties": {"word": {"enum": ["a", "b"]}},
        "required": ["word"],
        "additionalProperties": False,
    },
}


def body(**fields):
    return {
        "model": NAME,
        "input": "Say 1.",
        "max_output_tokens": 20,
        "temperature": 0.8,
        "seed": 3,
    } | fields


def respond(port, key=None, **fields):
    status, answer = call(port, PATH, body(**fields), key)
    assert status == 200, answer
    return answer


def events(port, **fields):
    """The events of a stream, whose names, numbers and end are checked."""
    response = opened(port, PATH, body(stream=True, **fields))
    assert response.status == 200, response.read()
    listed = []
    for text in response.read().decode().split("\n\n")[:-1]:
        name, data = text.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(listed)
        listed.append(event)
    return listed


def assembled(listed):
    """The output that a client makes of the events, each of which fits those before it."""
    items = []
    for event in listed:
        kind = event["type"].removeprefix("response.")
        number = event.get("output_index")
        if kind == "output_item.added":
            assert number == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
            continue
        if kind == "output_item.done":
            item = items[number] | {"status": event["item"]["status"]}
            assert item == event["item"]
            items[number] = item
            continue
        if number is None:
            continue
        item = items[number]
        assert number == len(items) - 1 and event["item_id"] == item["id"]
        if kind == "content_part.added":
            assert event["part"]["text"] == "" and event["content_index"] == 0
            item["content"].append(event["part"])
        elif kind == "output_text.delta":
            item["content"][0]["text"] += event["delta"]
            item["content"][0]["logprobs"] += event["logprobs"]
        elif kind == "reasoning_text.delta":
            item["content"][0]["text"] += event["delta"]
        elif kind == "reasoning_text.done":
            assert event["text"] == item["content"][0]["text"]
        elif kind == "output_text.done":
            assert event["text"] == item["content"][0]["text"]
            # the scores of tokens without a text of their own come at the end
            item["content"][0]["logprobs"] = event["logprobs"]
        elif kind == "content_part.done":
            assert event["part"] == item["content"][0]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        else:
            assert kind == "function_call_arguments.done"
            assert event["arguments"] == item["arguments"]
    return items


def bare(output):
    """Items without their ids."""
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in output]


def texts(output):
    return [part["text"] for item in output for part in item["content"]]


def check_stream(port, **fields):
    """The whole answer to a request, whose stream has the same."""
    whole = respond(port, **fields)
    listed = events(port, **fields)
    kinds = [event["type"].removeprefix("response.") for event in listed]
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == whole["status"]
    begun, end = listed[0]["response"], listed[-1]["response"]
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    assert begun["id"] == end["id"] and end["output"] == assembled(listed)
    assert bare(end["output"]) == bare(whole["output"])
    for name in ("status", "usage", "incomplete_details", "tools", "text", "object", "model"):
        assert end[name] == whole[name], name
    return whole


def test_the_text_is_that_of_a_chat(port, engine):
    for seed in range(4):
        whole = check_stream(port, seed=seed)
        want = csd.generate(engine, CHAT, seed=seed, max_new_tokens=20, temperature=0.8)
        assert texts(whole["output"]) == want.texts
        cut = want.finish_reasons[0] == "length"
        assert whole["status"] == ("incomplete" if cut else "completed")
        assert whole["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)
        assert whole["usage"]["output_tokens"] == len(want.tokens[0])
        assert whole["csd"]["seed"] == seed and whole["store"] is False


def test_an_input_is_the_messages_of_a_chat(port):
    items = [
        {"role": "user", "content": "Say 1."},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "1", "annotations": []}],
        },
        {"role": "user", "content": [{"type": "input_text", "text": "Say 2."}]},
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say 1."},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Say 2."},
    ]
    answer = respond(port, input=items, instructions="Be brief.", top_k=5)
    wanted = chat(messages=messages, seed=3, top_k=5)
    other = call(port, "/v1/chat/completions", wanted)[1]
    assert texts(answer["output"]) == [other["choices"][0]["message"]["content"]]
    assert answer["usage"]["input_tokens"] == other["usage"]["prompt_tokens"]
    assert answer["instructions"] == "Be brief." and answer["temperature"] == 0.8


def test_calls_and_their_results_are_messages():
    from csd.serve.http.api.responses_body import ChatBody

    listed = [
        {"role": "user", "content": "Say a, then b."},
        {"type": "message", "role": "assistant", "content": "So."},
        {"type": "function_call", "call_id": "1", "name": "say", "arguments": '{"word": "a"}'},
        {"type": "function_call", "call_id": "2", "name": "say", "arguments": '{"word": "b"}'},
        {"type": "function_call_output", "call_id": "1", "output": "result a"},
        {"type": "function_call_output", "call_id": "2", "output": "result b"},
        {"type": "function_call", "call_id": "3", "name": "say", "arguments": "{}"},
    ]
    calls = [
        {"id": name, "type": "function", "function": {"name": "say", "arguments": text}}
        for name, text in (("1", '{"word": "a"}'), ("2", '{"word": "b"}'), ("3", "{}"))
    ]
    chat = ChatBody(body(input=listed, tools=[SAY])).chat
    assert chat["messages"] == [
        {"role": "user", "content": "Say a, then b."},
        {"role": "assistant", "content": "So.", "tool_calls": calls[:2]},
        {"role": "tool", "tool_call_id": "1", "content": "result a"},
        {"role": "tool", "tool_call_id": "2", "content": "result b"},
        {"role": "assistant", "content": None, "tool_calls": calls[2:]},
    ]
    # a thought belongs to the assistant's next item; other servers' have no text
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    own = thought | {"content": [{"type": "reasoning_text", "text": "Hm."}]}
    assert ChatBody(body(input=[thought, *listed], tools=[SAY])).chat == chat
    # one that another server keeps to itself is read as its summary
    parts = [{"type": "summary_text", "text": text} for text in ("Add.", "Check.")]
    told = ChatBody(body(input=[thought | {"summary": parts}, listed[1]])).chat["messages"][0]
    assert told["reasoning_content"] == "Add.\n\nCheck."
    both = own | {"summary": parts}
    assert ChatBody(body(input=[both, listed[1]])).chat["messages"][0]["reasoning_content"] == "Hm."
    thinks = ChatBody(body(input=[own, *listed[:1], own, *listed[1:-1], own, listed[-1]])).chat
    thoughts = [message.get("reasoning_content") for message in thinks["messages"]]
    assert thoughts == [None, "Hm.", None, None, "Hm."]
    function = {key: value for key, value in SAY.items() if key != "type"}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert "tool_calls" not in listed[1]


def test_log_probabilities_are_those_of_the_chat(port):
    whole = check_stream(port, include=[LOGPROBS], top_logprobs=2)
    other = call(port, "/v1/chat/completions", chat(seed=3, logprobs=True, top_logprobs=2))[1]
    (part,) = whole["output"][0]["content"]
    assert part["logprobs"] == other["choices"][0]["logprobs"]["content"]
    assert whole["usage"]["output_tokens"] == len(part["logprobs"])


@needs_grammars
def test_a_format_is_a_grammar(port):
    schema = {"enum": ["yes", "no"]}
    text = {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
    for seed in range(3):
        whole = check_stream(port, text=text, seed=seed)
        assert whole["status"] == "completed" and whole["text"] == text
        assert json.loads(texts(whole["output"])[0]) in ("yes", "no")


@pytest.fixture
def template(engine, monkeypatch):
    """The toy's template, which reads tools and has calls as Hermes."""
    plain = engine.tokenizer.chat_template
    reads = "{% if tools %}{% for t in tools %}{{ t['function']['name'] }}{% endfor %}{% endif %}"
    monkeypatch.setattr(engine.tokenizer, "chat_template", reads + plain + "{# <tool_call> #}")


@needs_grammars
def test_calls_are_items(port, template):
    named = {"type": "function", "name": "say"}
    fields = dict(max_output_tokens=150, tools=[SAY], tool_choice=named)
    for seed in range(3):
        (item,) = check_stream(port, seed=seed, include=[LOGPROBS], **fields)["output"]
        assert (item["type"], item["name"], item["status"]) == ("function_call", "say", "completed")
        assert json.loads(item["arguments"])["word"] in ("a", "b")
        assert item["id"].startswith("fc_") and item["call_id"].startswith("call_")
    # a call that was cut has the beginning of its arguments
    whole = check_stream(port, **fields | {"max_output_tokens": 5})
    assert whole["status"] == whole["output"][0]["status"] == "incomplete"


@needs_grammars
def test_text_and_calls_of_one_choice_are_items(port, template):
    regex = r'So <tool_call>\{"name": "say", "arguments": \{"word": "[ab]"\}\}</tool_call>'
    fields = dict(max_output_tokens=150, tools=[SAY], regex=regex)
    first, second = check_stream(port, include=[LOGPROBS], **fields)["output"]
    assert texts([first]) == ["So"] and second["name"] == "say"
    assert len(first["content"][0]["logprobs"]) > len("So")


REFUSED = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"store": True}, "store"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"max_tool_calls": 3}, "max_tool_calls"),
    ({"n": 2}, "n"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"messages": CHAT}, "messages"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logprobs": True}, "logprobs"),
    ({"other": 1}, "other"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [SAY | {"parameters": 5}]}, "tools"),
    ({"tools": "say"}, "tools"),
    ({"tools": [SAY]}, "tools"),  # the template does not read them
    ({"tool_choice": "required"}, "tool_choice"),
    ({"include": ["reasoning.text"]}, "include"),
    ({"include": LOGPROBS}, "include"),
    ({"include": [[]]}, "include"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": [LOGPROBS], "top_logprobs": 21}, "top_logprobs"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
    ({"text": "json"}, "text"),
    ({"instructions": 5}, "instructions"),
    ({"max_output_tokens": 401}, "max_output_tokens"),
    ({"max_output_tokens": 399}, "input"),
    ({"max_output_tokens": "many"}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": None}, "input"),
    ({"input": ["Say 1."]}, "input"),
    ({"input": [{"role": "user"}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
    ({"input": [{"type": "reasoning", "content": [5]}]}, "input"),
    ({"input": [{"type": "reasoning", "summary": ["Add."]}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "say"}]}, "input"),
    ({"input": [*CHAT, {"type": "function_call_output", "call_id": "1"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[str(f) for f, _ in REFUSED])
def test_another_field_is_refused_by_its_name(port, fields, param):
    status, answer = call(port, PATH, body(**fields))
    error = answer["error"]
    assert status == 400 and error["type"] == "invalid_request_error", answer
    assert error["param"] == param, error
    assert param in error["message"] or error["message"].startswith("the prompt has"), error
    for name in ("messages", "max_tokens", "response_format", "reasoning_effort", "function."):
        assert name in fields or name not in error["message"], error


def test_an_error_names_the_item_of_the_input(port):
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
    for instructions in (None, "Be brief."):
        fields = dict(input=[*CHAT, image], instructions=instructions)
        _, answer = call(port, PATH, body(**fields))
        assert "input[1].content[0]" in answer["error"]["message"], answer


def test_values_that_ask_for_nothing(port):
    nothing = dict(
        background=False,
        store=False,
        truncation="disabled",
        include=["reasoning.encrypted_content", "web_search_call.results"],
        text={"format": {"type": "text"}, "verbosity": "medium"},
        reasoning={"effort": None, "summary": "auto"},
        previous_response_id=None,
        metadata={"a": "b"},
        user="me",
        tools=[],
        n=1,
        stream_options=None,
    )
    plain, answer = respond(port), respond(port, **nothing)
    assert bare(answer["output"]) == bare(plain["output"])
    assert answer["metadata"] == {"a": "b"} and plain["metadata"] == {}


def test_every_field_of_openai_is_decided_on():
    openai = pytest.importorskip("openai")
    from csd.serve.http.api import fields

    kind = openai.types.responses.response_create_params.ResponseCreateParamsStreaming
    known = {*fields.RESPONSES, *fields.COMMON, *fields.SAMPLING, *fields.IGNORED}
    known |= fields.NOTHING_IN_RESPONSES.keys() | fields.INSTEAD_IN_RESPONSES.keys()
    # refused as fields that are not known
    assert kind.__annotations__.keys() - known <= {
        "access_programs",
        "background_options",
        "context_management",
        "image",
        "max_tool_calls",
        "moderation",
        "prompt",
    }


def test_an_error_while_tokens_are_drawn_is_the_last_event(port):
    """All tokens are excluded, which the engine detects once it draws."""
    fields = dict(suppress_tokens=[5], allowed_token_ids=[5])
    status, answer = call(port, PATH, body(**fields))
    assert status == 400
    listed = events(port, **fields)
    error = answer["error"]
    assert [event["type"] for event in listed][-1] == "error"
    assert listed[-1]["message"] == error["message"] and listed[-1]["error"] == error


def test_a_response_is_not_found_later(port):
    answer = respond(port)
    assert call(port, f"{PATH}/{answer['id']}")[0] == 404


def test_the_limits_are_those_of_other_paths(engine):
    from csd.serve.http import Limits

    limits = Limits(body=2000, likely=300, turns=3)
    service = csd.AsyncEngine(engine, max_tokens=400, budget=8)
    with served(service, limits=limits, keys=("k", "l")) as (port, server):
        assert call(port, PATH, body())[0] == 401
        assert call(port, PATH, body(input="x" * 3000), "k")[0] == 413
        four = [{"role": "user", "content": "a"}] * 4
        status, answer = call(port, PATH, body(input=four), "k")
        assert status == 400 and answer["error"]["message"].startswith("input must have at most 3")
        # a stream has each log-probability five times
        likely = dict(include=[LOGPROBS], top_logprobs=10)
        assert call(port, PATH, body(**likely), "k")[0] == 200
        status, answer = call(port, PATH, body(stream=True, **likely), "k")
        assert status == 400 and answer["error"]["param"] == "top_logprobs"
        assert server.open == 0
