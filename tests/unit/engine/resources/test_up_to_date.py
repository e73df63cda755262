"""A call sees its model as it is: nothing depends on previous calls."""

import itertools

import pytest
import torch
from helpers.models import checkpoints
from helpers.oracles.oracle import generate as plain
from helpers.targets import few

import csd
from csd.engine.generate import engine_for


def resize(model):
    model.resize_token_embeddings(checkpoints.VOCAB + 6, mean_resizing=False)


def shorten(model):
    model.config.max_position_embeddings = 32


def other_rotary(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def assign_rotary(model):
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq * 3


def other_ends(model):
    model.generation_config.eos_token_id = 11


CHANGES = [resize, shorten, other_rotary, assign_rotary, other_ends]
PROMPT = [5, 6, 7, 8]


def call(model) -> tuple:
    """Tokens and reasons, with the defaults for length and end tokens."""
    out = csd.generate(model, PROMPT, num_samples=2, seed=3, temperature=0.8)
    return out.tokens, out.finish_reasons


@pytest.fixture(autouse=True)
def released():
    yield
    csd.release()


def small():
    return checkpoints.build("llama", dtype=torch.float64, max_position_embeddings=48)


@few(3)
@pytest.mark.parametrize(
    "changes",
    itertools.permutations(CHANGES, 2),
    ids=lambda pair: "-".join(c.__name__ for c in pair),
)
def test_calls_between_changes_equal_fresh_engines(changes):
    model, other = small(), small()
    call(model)
    for change in changes:
        change(model)
        change(other)
        assert call(model) == call(csd.Engine(other)), change.__name__


def test_a_module_that_is_cast_takes_the_backend_of_its_dtype():
    model, other = small(), small()
    engine = csd.Engine(model)
    for dtype in (torch.float64, torch.float16, torch.float32, torch.float64):
        model.to(dtype)
        fresh = csd.Engine(other.to(dtype))
        assert call_engine(engine) == call_engine(fresh)
        assert engine.ops.name == fresh.ops.name


def call_engine(engine) -> tuple:
    out = engine.generate(PROMPT, num_samples=2, seed=3, temperature=0.8, max_new_tokens=16)
    return out.tokens, out.finish_reasons


@pytest.mark.parametrize("change", [other_rotary, assign_rotary])
def test_rotary_frequencies_are_read_at_each_call(change):
    model = small()
    before = call(model)
    change(model)
    want = plain(model, PROMPT, seed=3, sample=0, max_new_tokens=44, temperature=0.8)[0]
    got = csd.generate(model, PROMPT, seed=3, temperature=0.8, end_token_ids=[])[0].tokens
    assert got == want != before[0][0]


def test_new_token_ids_are_served_after_a_resize():
    model = small()
    call(model)
    resize(model)
    new = [5, checkpoints.VOCAB + 5]
    want = plain(model, new, seed=1, sample=0, max_new_tokens=5)[0]
    got = csd.generate(model, new, seed=1, max_new_tokens=5, end_token_ids=[])
    assert got[0].tokens == want


def test_sizes_that_disagree_are_refused():
    model = small()
    model.config.vocab_size += 1
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight must have the shape \(.*got"):
        csd.generate(model, PROMPT)


class Characters:
    """A tokenizer of one character a token."""

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(c) % checkpoints.VOCAB for c in text]}

    def decode(self, tokens, skip_special_tokens=True):
        return "".join(chr(ord("a") + t) for t in tokens)


def test_a_tokenizer_serves_its_call_only():
    model = small()
    first = csd.generate(model, PROMPT, seed=0, max_new_tokens=3, tokenizer=Characters())
    assert first.texts[0] is not None
    assert csd.generate(model, PROMPT, seed=0, max_new_tokens=3).texts == [None]
    with pytest.raises(ValueError, match="no tokenizer"):
        csd.generate(model, "abc")


def test_a_model_that_shrinks_under_a_stream_is_an_error():
    model = small()
    stream = csd.stream(model, PROMPT, max_new_tokens=40)
    shorten(model)
    with pytest.raises(ValueError, match="changed after the call was made: prompt 0 must"):
        next(stream)
    assert len(csd.generate(model, PROMPT, max_new_tokens=4)) == 1


def test_a_folder_that_was_saved_again_is_loaded_again(tmp_path, monkeypatch):
    folder = checkpoints.make("llama", tmp_path / "model")
    options = dict(temperature=0, max_new_tokens=6, end_token_ids=[])
    first = csd.generate(folder, PROMPT, **options).tokens
    assert engine_for(folder) is engine_for(folder)
    checkpoints.build("llama", seed=9).save_pretrained(folder)
    second = csd.generate(folder, PROMPT, **options).tokens
    csd.release()
    assert csd.generate(folder, PROMPT, **options).tokens == second != first
    # a name is a path from where the call is made
    monkeypatch.chdir(tmp_path)
    engine = engine_for("model")
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    checkpoints.make("qwen2", tmp_path / "else" / "model")
    assert engine_for("model") is not engine
