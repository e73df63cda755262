"""The `openai` package as a client."""

import asyncio

import pytest
from helpers.runs.served import NAME, served

import csd
from csd.models.demo import toy

pytest.importorskip("starlette")
openai = pytest.importorskip("openai")

CHAT = [{"role": "user", "content": "Say 1."}]
HOW = dict(model=NAME, messages=CHAT, max_tokens=16, temperature=0.9)


@pytest.fixture(scope="module")
def engine():
    model, tokenizer = toy()
    model.generation_config.eos_token_id = [1, 40, 41]
    return csd.Engine(model.double(), tokenizer=tokenizer, max_slots=24)


@pytest.fixture(scope="module")
def url(engine):
    with served(csd.AsyncEngine(engine, max_tokens=300, budget=8), keys=("k",)) as (port, _):
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=url, api_key="k", max_retries=0)


def wanted(engine, seed, n):
    return csd.generate(engine, CHAT, num_samples=n, seed=seed, max_new_tokens=16, temperature=0.9)


def test_chat(client, engine):
    answer = client.chat.completions.create(n=8, seed=3, logprobs=True, top_logprobs=2, **HOW)
    want = wanted(engine, 3, 8)
    assert [c.message.content for c in answer.choices] == want.texts
    assert [c.finish_reason for c in answer.choices] == want.finish_reasons
    assert answer.usage.completion_tokens == sum(map(len, want.tokens))
    for choice, sample in zip(answer.choices, want, strict=True):
        logprobs = [entry.logprob for entry in choice.logprobs.content]
        assert logprobs == pytest.approx(sample.raw_logprobs)
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    assert answer.csd["seed"] == 3
    again = client.chat.completions.create(n=8, seed=answer.csd["seed"], **HOW)
    assert [c.message.content for c in again.choices] == want.texts


def test_a_seed_is_drawn_and_returned(client):
    one, two = (client.chat.completions.create(**HOW) for _ in range(2))
    assert one.csd["seed"] != two.csd["seed"]
    again = client.chat.completions.create(seed=one.csd["seed"], **HOW)
    assert again.choices[0].message.content == one.choices[0].message.content


def test_stream(client, engine):
    texts, reasons, usage = [""] * 8, {}, None
    stream = client.chat.completions.create(
        n=8, seed=3, stream=True, stream_options={"include_usage": True}, **HOW
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
    want = wanted(engine, 3, 8)
    assert texts == want.texts and [reasons[i] for i in range(8)] == want.finish_reasons
    assert usage.completion_tokens == sum(map(len, want.tokens))


def test_completions_and_models(client, engine):
    answer = client.completions.create(
        model=NAME, prompt="Once", max_tokens=9, n=2, seed=1, logprobs=2, echo=True
    )
    want = csd.generate(engine, "Once", num_samples=2, max_new_tokens=9, seed=1)
    assert [c.text for c in answer.choices] == ["Once" + text for text in want.texts]
    for choice, sample in zip(answer.choices, want, strict=True):
        assert choice.logprobs.token_logprobs[4:] == pytest.approx(sample.raw_logprobs)
    assert [m.id for m in client.models.list()] == [NAME]


def test_token_ids(client, engine):
    answer = client.completions.create(
        model=NAME,
        prompt=[20, 30, 40],
        max_tokens=9,
        seed=1,
        extra_body={"return_token_ids": True, "top_k": 5},
    )
    want = csd.generate(engine, [20, 30, 40], max_new_tokens=9, seed=1, top_k=5)
    assert answer.choices[0].token_ids == want.tokens[0]


def test_errors(client, url):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**HOW | {"temperature": -1})
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**HOW | {"model": "gpt"})
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url, api_key="x").models.list()


def test_many_at_once(url, engine):
    async def clients():
        async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
            asked = [client.chat.completions.create(n=3, seed=s, **HOW) for s in range(16)]
            return await asyncio.gather(*asked)

    answers = asyncio.run(clients())
    for seed, answer in enumerate(answers):
        assert [c.message.content for c in answer.choices] == wanted(engine, seed, 3).texts


def test_a_stream_that_is_left(url):
    async def leave():
        async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
            stream = await client.chat.completions.create(
                stream=True, extra_body={"ignore_eos": True}, **HOW | {"max_tokens": 200}
            )
            async for _ in stream:
                break
            await stream.close()
            return await client.chat.completions.create(**HOW)

    assert asyncio.run(leave()).choices


TOOL = {
    "type": "function",
    "function": {
        "name": "say",
        "parameters": {
            "type": "object",
            "properties": {"word": {"enum": ["a", "b"]}},
            "required": ["word"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "say"}}


@pytest.fixture
def reads_tools(engine, monkeypatch):
    """A template with tools, calls and their results, as Hermes has them."""
    pytest.importorskip("llguidance")
    plain = engine.tokenizer.chat_template
    call = "{{ call.id }}{{ call.function.name }}{{ call.function.arguments }}"
    calls = f"{{% for call in m.tool_calls or () %}}{call}{{% endfor %}}{{{{ m.tool_call_id }}}}"
    calls = f"{{% for m in messages %}}{calls}{{% endfor %}}"
    text = f"{plain}{{% if tools %}}<tool_call>{{{{ tools[0].function.name }}}}{calls}{{% endif %}}"
    monkeypatch.setattr(engine.tokenizer, "chat_template", text)


def test_tools(client, reads_tools):
    how = HOW | dict(max_tokens=100, seed=1, tools=[TOOL], tool_choice=NAMED)
    choice = client.chat.completions.create(**how).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert (call.type, call.function.name) == ("function", "say")
    assert call.function.arguments.strip().startswith("{") and call.id.startswith("call_")
    with client.chat.completions.stream(**how) as stream:
        final = stream.get_final_completion().choices[0]
    (streamed,) = final.message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    assert final.finish_reason == "tool_calls"


ASKED = dict(model=NAME, input="Say 1.", max_output_tokens=16, temperature=0.9)


def test_responses(client, engine):
    answer = client.responses.create(**ASKED, extra_body={"seed": 3})
    want = wanted(engine, 3, 1)
    assert answer.output_text == want.texts[0] and answer.object == "response"
    assert answer.usage.output_tokens == len(want.tokens[0])
    cut = want.finish_reasons == ["length"]
    assert answer.status == ("incomplete" if cut else "completed")
    # the output of one response is part of the input of the next one
    items = [*CHAT, *answer.output, {"role": "user", "content": "Say 2."}]
    messages = [
        *CHAT,
        {"role": "assistant", "content": answer.output_text},
        {"role": "user", "content": "Say 2."},
    ]
    after = client.responses.create(**ASKED | {"input": items}, extra_body={"seed": 4})
    same = csd.generate(engine, messages, seed=4, max_new_tokens=16, temperature=0.9)
    assert after.output_text == same.texts[0]


def test_a_stream_of_a_response(client, engine):
    how = ASKED | dict(include=["message.output_text.logprobs"], top_logprobs=2)
    with client.responses.stream(**how, extra_body={"seed": 3}) as stream:
        events = [*stream]
    want = wanted(engine, 3, 1)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == want.texts[0]
    final = events[-1].response
    (part,) = final.output[0].content
    assert part.text == want.texts[0]
    assert [one.logprob for one in part.logprobs] == pytest.approx(want.raw_logprobs[0])
    assert all(len(one.top_logprobs) == 2 for one in part.logprobs)
    plain = [*client.responses.create(**ASKED, stream=True, extra_body={"seed": 3})]
    assert [event.type for event in plain if "delta" not in event.type] == [
        event.type for event in events if "delta" not in event.type
    ]
    assert plain[-1].response.output_text == want.texts[0]


def test_calls_of_a_response(client, reads_tools):
    function = {"type": "function", **TOOL["function"]}
    how = ASKED | dict(tools=[function], tool_choice={"type": "function", "name": "say"})
    how |= dict(max_output_tokens=100, extra_body={"seed": 1})
    (item,) = client.responses.create(**how).output
    assert (item.type, item.name, item.status) == ("function_call", "say", "completed")
    with client.responses.stream(**how) as stream:
        (streamed,) = stream.get_final_response().output
    assert streamed.arguments == item.arguments
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "done"}
    more = how | dict(input=[*CHAT, item, result], tool_choice="none", max_output_tokens=9)
    assert client.responses.create(**more).output_text


def test_errors_of_a_response(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASKED | {"previous_response_id": "resp_1"})
    assert caught.value.param == "previous_response_id"
    # which only the engine detects
    body = {"suppress_tokens": [5], "allowed_token_ids": [5]}
    with pytest.raises(openai.APIError, match="allowed_token_ids"):
        [*client.responses.create(**ASKED, stream=True, extra_body=body)]


def test_langchain_binds_tools(url, reads_tools):
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(model=NAME, base_url=url, api_key="k", max_tokens=100, seed=1)
    bound = model.bind_tools([TOOL], tool_choice="say")
    (call,) = bound.invoke("Say a.").tool_calls
    assert call["name"] == "say" and call["args"]["word"] in ("a", "b")
