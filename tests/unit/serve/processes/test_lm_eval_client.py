"""lm-evaluation-harness as a client, by its own API models."""

import pytest
import torch
from helpers.runs.served import NAME, served

import csd
from csd.models.demo import toy

pytest.importorskip("starlette")
pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI


@pytest.fixture(scope="module")
def model():
    return toy()[0].double()


@pytest.fixture(scope="module")
def engine(model):
    return csd.Engine(model, tokenizer=toy()[1], max_slots=16)


@pytest.fixture(scope="module")
def port(engine):
    with served(csd.AsyncEngine(engine, max_tokens=400, budget=8)) as (port, _):
        yield port


def instances(kind, rows):
    return [Instance(kind, {}, row, i) for i, row in enumerate(rows)]


def test_local_completions(port, engine, model):
    api = LocalCompletionsAPI(
        base_url=f"http://127.0.0.1:{port}/v1/completions",
        model=NAME,
        num_concurrent=4,
        tokenizer_backend="remote",
        max_length=300,
    )
    how = {"until": ["q"], "max_gen_toks": 12, "temperature": 0.0, "do_sample": False}
    texts = api.generate_until(instances("generate_until", [("One.", how), ("Two.", how)]))
    for prompt, text in zip(("One.", "Two."), texts, strict=True):
        want = csd.generate(engine, prompt, max_new_tokens=12, temperature=0, stop=["q"])
        assert text == want.texts[0]
    rows = [("A cat", " sat"), ("A dog", " ran away")]
    found = api.loglikelihood(instances("loglikelihood", rows))
    for (context, rest), (logprob, greedy) in zip(rows, found, strict=True):
        ids = engine.tokenizer(context + rest)["input_ids"]
        with torch.no_grad():
            probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        places = range(len(ids) - len(rest), len(ids))
        assert logprob == pytest.approx(sum(float(probs[i - 1, ids[i]]) for i in places), abs=1e-5)
        assert greedy == all(int(probs[i - 1].argmax()) == ids[i] for i in places)


def test_local_chat_completions_with_repeats(port, engine):
    api = LocalChatCompletion(
        base_url=f"http://127.0.0.1:{port}/v1/chat/completions", model=NAME, num_concurrent=4
    )
    how = {"until": ["q"], "max_gen_toks": 10, "temperature": 0.7, "do_sample": True}
    prompt = api.apply_chat_template([{"role": "user", "content": "Say 1."}])
    texts = api.generate_until(instances("generate_until", [(prompt, how)] * 3))
    want = csd.generate(
        engine,
        [{"role": "user", "content": "Say 1."}],
        max_new_tokens=10,
        temperature=0.7,
        stop=["q"],
        seed=1234,
    )
    # it sends one seed for all, and equal requests have equal samples
    assert texts == [want.texts[0]] * 3
