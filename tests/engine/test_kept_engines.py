"""The engine that is kept for a model: it follows the weights, and is gone with the model."""

import gc
import weakref

import checkpoints
import pytest
import torch
import transformers
from dense import their_logits
from replacing import REPLACED, perturb

import csd
from csd.engine.generate import engine_for


def greedy(model, prompt: list[int], count: int) -> list[int]:
    """The plain loop."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(their_logits(model, torch.tensor(tokens))[-1].argmax()))
    return tokens[len(prompt) :]


def generated(model) -> list[int]:
    result = csd.generate(model, [5, 6, 7], temperature=0, max_new_tokens=8, ignore_eos=True)
    return result[0].tokens


@pytest.fixture
def model():
    yield checkpoints.build("qwen2", dtype=torch.float64)
    csd.release()


def test_generate_sees_a_change_in_place(model):
    first = generated(model)
    engine = engine_for(model)
    decoder = engine.decoder
    perturb(model)
    want = greedy(model, [5, 6, 7], 8)
    assert want != first
    assert generated(model) == want
    assert engine_for(model) is engine and engine.decoder is decoder


@pytest.mark.parametrize("change", REPLACED[:7], ids=lambda f: f.__name__)
def test_generate_gives_the_tokens_of_replaced_weights(model, change):
    first = generated(model)
    assert first == greedy(model, [5, 6, 7], 8)
    engine = engine_for(model)
    change(model)
    assert generated(model) == greedy(model, [5, 6, 7], 8)
    assert engine_for(model) is engine


def test_the_generation_config_is_read_at_each_call(model):
    assert generated(model) == greedy(model, [5, 6, 7], 8)
    stop = greedy(model, [5, 6, 7], 3)[2]
    model.generation_config = transformers.GenerationConfig(eos_token_id=stop)
    sample = csd.generate(model, [5, 6, 7], temperature=0, max_new_tokens=8)[0]
    assert sample.finish_reason == "stop" and sample.tokens[-1] == stop
    assert len(sample.tokens) <= 3


def test_the_engine_dies_with_its_model():
    model = checkpoints.build("llama")
    generated(model)
    alive = [weakref.ref(x) for x in (model, engine_for(model), engine_for(model).decoder)]
    qkv = weakref.ref(engine_for(model).decoder.layers[0].qkv)
    assert all(ref() is not None for ref in [*alive, qkv])
    del model
    gc.collect()
    assert [ref() for ref in [*alive, qkv]] == [None] * 4


def test_an_engine_of_ones_own_does_not_keep_the_module():
    """It goes on with the weights that it shares."""
    model = checkpoints.build("llama", dtype=torch.float64)
    engine = csd.Engine(model)
    want = greedy(model, [5, 6, 7], 8)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert generated(engine) == want


def test_release_drops_the_engines(checkpoint):
    path = checkpoint("llama")
    model = checkpoints.build("llama")
    generated(model)
    generated(path)
    engines = [weakref.ref(engine_for(x)) for x in (model, path)]
    weights = weakref.ref(engines[1]().decoder.layers[0].qkv)
    csd.release()
    gc.collect()
    assert [ref() for ref in [*engines, weights]] == [None] * 3
    # the user's model is the user's, and both can be used again
    assert generated(model) == generated(path)
    csd.release()


def test_release_gives_an_engine_its_caches_back(checkpoint):
    path = checkpoint("llama")
    with csd.Engine(path) as engine:
        want = generated(engine)
        held = weakref.ref(engine._step.cache)
    gc.collect()
    assert held() is None
    assert generated(engine) == want
