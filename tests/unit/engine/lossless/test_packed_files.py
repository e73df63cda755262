"""Packed weights of GGUF files: drafts, sharing, caches and servers change no bit of a sample."""

from pathlib import Path

import pytest
from helpers.models.packed_files import CASES, write
from helpers.runs.served import call, served
from helpers.targets import few

import csd
from csd.kernels.layers.quantized import has_loop
from csd.models.demo import toy

pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(not has_loop(), reason="no loop of quantised weights here")

# longer than the windows of 64
LONG = [(7 * i + 3) % 61 for i in range(90)]
PROMPTS = [LONG, [*LONG[:70], 5, 9], [5, 9, 5, 5]]
DRAWN = dict(seed=3, num_samples=3, max_new_tokens=16, temperature=0.7, top_p=0.9, end_token_ids=[])
GRAMMAR = DRAWN | dict(end_token_ids=[1], regex="(abc|abd|b.)+(true|false)")


@pytest.fixture(scope="module", params=CASES)
def file(request, tmp_path_factory):
    return write(request.param, tmp_path_factory.mktemp("packed"), vocab_size=len(toy()[1]))


def values(samples):
    return [(x.tokens, x.logprobs, x.raw_logprobs) for x in samples]


def test_samples_are_plain_samplings(file):
    _, tokenizer = toy()
    with csd.Engine(file, tokenizer=tokenizer, share_rows=False, prefix_cache=False) as engine:
        assert engine.exact
        plain = values(engine.generate(PROMPTS, speculate=False, **DRAWN))
        grammar = engine.generate(LONG, speculate=False, **GRAMMAR).tokens
    with csd.Engine(file, tokenizer=tokenizer, max_slots=5, prefill_chunk=32) as engine:
        for options in (dict(budget=12), dict(budget=12, prior=True), dict(speculate=False)):
            found = engine.generate(PROMPTS, **DRAWN, **options)
            assert values(found) == plain, options
        # the second call reads nothing again
        assert found[0].stats.cached_tokens > 0
        assert engine.generate(LONG, budget=12, **GRAMMAR).tokens == grammar
        given = csd.score(engine, LONG, found[0].tokens, temperature=0.7, top_p=0.9)
        assert given.logprobs == found[0].logprobs
    # a module's own engine, whose weights are not a copy
    with csd.Engine(csd.gguf_module(file), exact=True) as engine:
        assert values(engine.generate(PROMPTS, budget=12, **DRAWN)) == plain


@few(2)
def test_branches_of_a_session_go_on_as_texts(file):
    turn = dict(max_new_tokens=8, end_token_ids=[], temperature=0.7)
    with csd.Engine(file) as engine:
        session = engine.session(LONG, num_samples=2, seed=3)
        session.sample(budget=12, **turn)
        made = session[0].fork(num_samples=2)
        session.sample(budget=12, **turn)
    with csd.Engine(file, share_rows=False, prefix_cache=False) as engine:
        again = engine.session(LONG, num_samples=2, seed=3)
        again.sample(speculate=False, **turn)
        forks = again[0].fork(num_samples=2)
        for branch in [*again]:
            again.sample([branch], speculate=False, **turn)
    for x, y in zip([*session, *made], [*again, *forks], strict=True):
        assert (x.tokens, x.logprobs) == (y.tokens, y.logprobs)


@few(2)
def test_choices_of_the_server_are_samples(file):
    _, tokenizer = toy()
    with csd.Engine(file, tokenizer=tokenizer, share_rows=False) as engine:
        plain = engine.generate("Say it: ", speculate=False, **DRAWN)
    body = dict(prompt="Say it: ", n=3, max_tokens=16, temperature=0.7, top_p=0.9, seed=3)
    with served(file, tokenizer=tokenizer) as (port, _):
        status, answer = call(port, "/v1/completions", body | dict(ignore_eos=True))
    assert status == 200, answer
    assert [choice["text"] for choice in answer["choices"]] == plain.texts


@few(2)
def test_replaced_weights_are_those_of_the_next_call(file, tmp_path):
    def draw(model):
        with csd.Engine(model) as engine:
            return engine.generate(LONG, **DRAWN).tokens

    model, other = (
        csd.gguf_module(x) for x in (file, write(Path(file).stem, tmp_path, vocab_size=98, seed=1))
    )
    with csd.Engine(model) as engine:
        first = engine.generate(LONG, **DRAWN).tokens
        assert engine.generate(LONG, **DRAWN).stats.cached_tokens > 0
        for part in ("model.layers.0.self_attn.o_proj", "lm_head"):
            model.get_submodule(part).weight = other.get_submodule(part).weight
            out = engine.generate(LONG, **DRAWN)
            assert out.stats.cached_tokens == 0
            assert out.tokens == draw(model) != first
            first = out.tokens
