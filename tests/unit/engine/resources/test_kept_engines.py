"""The engine that is kept for a model: it follows the weights, and is gone with the model."""

import gc
import weakref

import pytest
import torch
import transformers
from helpers.models import checkpoints
from helpers.models.replacing import REPLACED, perturb
from helpers.oracles.dense import their_logits

import csd
from csd.engine import generate
from csd.engine.generate import engine_for
from csd.engine.resources.held_bytes import held_bytes


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
        held = weakref.ref(engine.caches.step.cache)
    gc.collect()
    assert held() is None
    assert generated(engine) == want


@pytest.fixture
def folders(tmp_path):
    made = [checkpoints.make("llama", tmp_path / str(i), seed=i) for i in range(4)]
    csd.release()
    yield made
    csd.release()


def test_a_sweep_over_folders_keeps_as_many_engines_as_memory_holds(folders, monkeypatch):
    options = dict(max_new_tokens=4, seed=0, ignore_eos=True)
    want = [csd.generate(folder, [5, 6, 7], **options).tokens for folder in folders]
    every = [weakref.ref(engine_for(folder)) for folder in folders]
    # all of them fit in this machine's memory
    assert len({id(ref()) for ref in every}) == 4
    held = [held_bytes(ref()) for ref in every]
    weights = sum(p.nbytes for p in checkpoints.build("llama").parameters())
    assert all(weights <= size for size in held)
    csd.release()
    gc.collect()
    assert [ref() for ref in every] == [None] * 4
    # half of this holds two of them and the files of a third
    monkeypatch.setattr(
        generate,
        "free_bytes",
        lambda device: 5.5 * max(held) - sum(held_bytes(e) for e, _ in generate._by_name.values()),
    )
    kept = []
    for folder, tokens in zip(folders, want, strict=True):
        # used before each other one, so never the one used longest ago
        assert csd.generate(folders[0], [5, 6, 7], **options).tokens == want[0]
        assert csd.generate(folder, [5, 6, 7], **options).tokens == tokens
        kept.append(weakref.ref(engine_for(folder)))
    gc.collect()
    assert kept[0]() is engine_for(folders[0])
    assert [ref() is None for ref in kept] == [False, True, False, False]


def test_an_engine_in_a_call_is_not_dropped(folders, monkeypatch):
    stream = csd.stream(folders[0], [5, 6, 7], num_samples=3, max_new_tokens=6, ignore_eos=True)
    next(stream)
    busy = engine_for(folders[0])
    monkeypatch.setattr(generate, "free_bytes", lambda device: 0)
    for folder in folders[1:]:
        csd.generate(folder, [5, 6, 7], max_new_tokens=2)
    assert len(generate._by_name) == 2 and engine_for(folders[0]) is busy
    assert len([*stream]) == 2
