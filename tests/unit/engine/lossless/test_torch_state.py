"""State of torch during a call: csd's own, and the caller's in functions of the caller."""

import pytest
import torch
from helpers.models import checkpoints

import csd
from csd.utils.torch_state import _PLAIN, _State

PROMPT = [3, 7, 11, 5]


@pytest.fixture
def model():
    made = checkpoints.build("llama")
    made.generation_config.pad_token_id = 0
    return made


@pytest.fixture
def disturbed(model):
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        torch.set_default_dtype(torch.float64)
        yield _State.now()
        torch.set_default_dtype(torch.float32)


def test_functions_of_the_caller_have_the_callers_state(disturbed, model):
    seen = {}

    def note(name, found=None):
        def function(*args):
            seen[name] = _State.now()
            return args[1] if found is None else found

        return function

    csd.generate(
        model,
        PROMPT,
        num_samples=2,
        max_new_tokens=3,
        seed=0,
        end_token_ids=[],
        callback=note("callback", 0),
        until=note("until", False),
        logits_processor=note("logits"),
    )
    assert seen == dict.fromkeys(("callback", "until", "logits"), disturbed)
    assert _State.now() == disturbed != _PLAIN


def test_a_stream_leaves_the_callers_state_between_samples(disturbed, model):
    stream = csd.stream(model, PROMPT, num_samples=3, max_new_tokens=3, seed=0)
    for _, sample in stream:
        assert _State.now() == disturbed
        if sample.index == 1:
            stream.close()
    assert _State.now() == disturbed


def test_the_state_is_restored_after_an_error(disturbed, model):
    def fail(*args):
        raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"):
        csd.generate(model, PROMPT, max_new_tokens=3, callback=fail)
    with pytest.raises(TypeError, match="model must be"):
        csd.Engine(3)
    assert _State.now() == disturbed


def test_every_entrance_runs_in_its_own_state(disturbed, model):
    """None of them fails, and each has the values of an undisturbed call."""

    def values():
        out = csd.score(model, PROMPT, [[4, 5], [6]])
        with csd.AsyncEngine(model, max_slots=2) as engine:
            handle = engine.submit(PROMPT, max_new_tokens=3, seed=1)
            served = handle.result().tokens
        ids = torch.tensor([PROMPT], device="cpu")
        generated = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            custom_generate=csd.hf_generate,
            do_sample=True,
            max_new_tokens=3,
            seed=2,
            top_k=0,
        )
        return out.raw_logprobs, served, generated.tolist()

    found = values()
    with torch.autocast("cpu", enabled=False), torch.device("cpu"):
        torch.set_default_dtype(torch.float32)
        assert values() == found
