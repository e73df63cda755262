"""Models with layers that have a state behind an engine's other doors: scores, history, service."""

import json

import pytest
import torch
from helpers.checks.host_reads import NoHostReads
from helpers.models.families import build
from helpers.targets import slow

import csd
from csd.kernels.ops import triton

PROMPTS = [[(7 * i + 3) % 61 for i in range(n)] for n in (30, 5)]
OPTIONS = dict(
    num_samples=3,
    seed=4,
    max_new_tokens=18,
    temperature=0.7,
    end_token_ids=[],
)
HOW = {"fused": ("qwen3_5_text", "fused"), "module": ("bamba", "module")}


@pytest.fixture(scope="module", params=HOW)
def how(request):
    family, decoder = HOW[request.param]
    return dict(model=build(family), decoder=decoder)


@pytest.fixture(scope="module")
def engine(how):
    return csd.Engine(**how)


@pytest.fixture(scope="module")
def plain(engine):
    return engine.generate(PROMPTS, speculate=False, **OPTIONS)


def test_scores_are_those_that_the_samples_were_drawn_with(engine, plain):
    out = csd.score(engine, PROMPTS, [x.tokens for x in plain])
    for found, want in zip(out, plain, strict=True):
        for sample, other in zip(found, want, strict=True):
            assert sample.raw_logprobs == pytest.approx(other.raw_logprobs, abs=1e-9)


def test_a_samples_text_continues_as_a_prompt(engine, plain):
    """A state that a prompt leaves is the one that its tokens leave as a sample's."""
    given = PROMPTS[0] + plain[0][0].tokens[:10]
    scored = csd.score(engine, given, [plain[0][0].tokens[10:]])
    # transformers' form for many tokens is float32, whatever the dtype
    assert scored[0].raw_logprobs == pytest.approx(plain[0][0].raw_logprobs[10:], abs=1e-4)


def test_history_drafts_and_changes_no_token(engine, plain):
    out = engine.generate(PROMPTS[0], history=plain[0], budget=16, **OPTIONS)
    assert out.tokens == plain[0].tokens
    assert out.stats.accepted["history"] > 10


def test_a_service_draws_the_same_under_load(how, plain):
    service = csd.AsyncEngine(**how, max_slots=4, max_tokens=256, budget=8)
    try:
        handles = [service.submit(p, owner=o, **OPTIONS) for o in "ab" for p in PROMPTS]
        for handle, want in zip(handles, [*plain, *plain], strict=True):
            assert handle.result().tokens == want.tokens
        assert service.engine.caches.step.cache.states.prompts == {}
    finally:
        service.close()


def test_static_steps_draw_the_same_and_read_nothing_on_the_host(how, plain):
    with csd.Engine(**how, static=True, kernels="reference", max_slots=3) as static:
        out = static.generate(PROMPTS[0], budget=8, **OPTIONS)
        assert out.tokens == plain[0].tokens


@pytest.mark.parametrize(("family", "decoder"), [("qwen3_5_text", "fused"), ("bamba", "module")])
def test_forward_and_commit_read_nothing_on_the_host(family, decoder):
    """Kernels run at fixed sizes, with padding."""
    with csd.Engine(
        build(family, torch.float32), decoder=decoder, static=True, kernels="reference", max_slots=2
    ) as e:
        e.generate(PROMPTS[1], num_samples=1, max_new_tokens=2, seed=1, budget=2)
        step, slots = e.caches.step, e.caches.step.slots
        # the sample that was drawn, whose pages are free but hold what they held
        slots.group.zero_(), slots.live.fill_(True), slots.max_new.fill_(9)
        step.cache.prompt_pages.zero_(), step.cache.slot_pages.fill_(1)
        step.ops = triton()
        with NoHostReads():
            pool = step.ops.roots(slots, 3)
            verdict, _ = step.verify(step.forward(pool), pool)
            step.commit(pool, verdict)
        assert pool.rows == 3 and verdict.accept_count.tolist() == [1]


# the server's own tests and the service above have the rest in every run
@slow
def test_a_server_answers_with_the_engines_samples():
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    from helpers.runs.served import NAME, call, served

    from csd.models.demo import toy

    tokenizer = toy()[1]
    model = build("qwen3_5_text", vocab_size=len(tokenizer))
    engine = csd.Engine(model, tokenizer=tokenizer)
    want = engine.generate("Say 1.", num_samples=3, seed=7, max_new_tokens=12, temperature=0.8)
    with served(csd.AsyncEngine(engine, max_tokens=200, budget=8)) as (port, _):
        body = dict(model=NAME, prompt="Say 1.", n=3, seed=7, max_tokens=12, temperature=0.8)
        status, answer = call(port, "/v1/completions", body)
        assert status == 200, json.dumps(answer)
        assert [choice["text"] for choice in answer["choices"]] == want.texts
