"""inspect-ai as a client, by its provider for OpenAI's interface."""

import pytest
from helpers.runs.served import NAME, served

import csd
from csd.models.demo import toy

pytest.importorskip("starlette")
pytest.importorskip("inspect_ai")

import inspect_ai
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

QUESTIONS = ["Say 1.", "Say two."]
HOW = dict(max_tokens=16, temperature=0.9, seed=3)


@pytest.fixture(scope="module")
def engine():
    model, tokenizer = toy()
    return csd.Engine(model.double(), tokenizer=tokenizer, max_slots=16)


@pytest.fixture(scope="module")
def model(engine):
    with served(csd.AsyncEngine(engine, max_tokens=300, budget=8), keys=("k",)) as (port, _):
        yield get_model(
            f"openai-api/csd/{NAME}",
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key="k",
            memoize=False,
        )


def wanted(engine, question, n=1):
    return csd.generate(
        engine,
        [{"role": "user", "content": question}],
        num_samples=n,
        max_new_tokens=16,
        temperature=0.9,
        seed=3,
    )


def test_a_task_is_scored_on_the_texts_of_generate(model, engine, tmp_path):
    texts = {q: wanted(engine, q).texts[0] for q in QUESTIONS}
    # one target that its text has, and one that no text has
    task = inspect_ai.Task(
        dataset=[
            Sample(input=QUESTIONS[0], target=texts[QUESTIONS[0]].strip()[:4]),
            Sample(input=QUESTIONS[1], target="a text that is too long to be said"),
        ],
        solver=generate(),
        scorer=includes(ignore_case=False),
        config=GenerateConfig(**HOW),
    )
    (log,) = inspect_ai.eval(
        task, model=model, epochs=2, display="none", log_dir=str(tmp_path), max_connections=4
    )
    assert log.status == "success", log.error
    for sample in log.samples:
        assert sample.output.completion == texts[sample.input]
        assert sample.output.usage.output_tokens == len(wanted(engine, sample.input).tokens[0])
    # either is half right: of two questions, in two epochs
    assert log.results.scores[0].metrics["accuracy"].value == 0.5


def test_choices_and_log_probabilities(model, engine):
    import asyncio

    config = GenerateConfig(num_choices=4, logprobs=True, top_logprobs=2, **HOW)
    out = asyncio.run(model.generate(QUESTIONS[0], config=config))
    want = wanted(engine, QUESTIONS[0], 4)
    assert [c.message.text for c in out.choices] == want.texts
    for choice, sample in zip(out.choices, want, strict=True):
        found = [entry.logprob for entry in choice.logprobs.content]
        assert found == pytest.approx(sample.raw_logprobs)


def test_the_loop_of_tools(engine, model, tmp_path, monkeypatch):
    """A call is carried out, and its result is in the next prompt."""
    pytest.importorskip("llguidance")
    from inspect_ai.model import ChatMessageTool
    from inspect_ai.solver import use_tools
    from inspect_ai.tool import ToolFunction, tool

    said = []

    @tool
    def say():
        async def execute(number: bool):
            """Say a value.

            Args:
                number: The value.
            """
            said.append(number)
            return f"said {number}"

        return execute

    spaces = engine.tokenizer(" \n\t", add_special_tokens=False)["input_ids"]
    plain = engine.tokenizer.chat_template
    calls = "{% for m in messages %}{{ m.tool_calls }}{{ m.tool_call_id }}{% endfor %}"
    text = f"{plain}{{% if tools %}}<tool_call>{{{{ tools[0].function.name }}}}{calls}{{% endif %}}"
    monkeypatch.setattr(engine.tokenizer, "chat_template", text)
    task = inspect_ai.Task(
        dataset=[Sample(input="Say it.", target="said")],
        solver=[use_tools(say(), tool_choice=ToolFunction("say")), generate(tool_calls="single")],
        # a random model may repeat spaces between two parts of JSON to the end
        config=GenerateConfig(
            max_tokens=60, temperature=0.9, seed=3, extra_body={"suppress_tokens": spaces}
        ),
    )
    (log,) = inspect_ai.eval(task, model=model, display="none", log_dir=str(tmp_path))
    assert log.status == "success", log.error
    (sample,) = log.samples
    results = [m for m in sample.messages if isinstance(m, ChatMessageTool)]
    assert len(said) >= 1 and [m.text for m in results][:1] == [f"said {said[0]}"]
