"""Prompts that share a pass: the same keys, values and tokens as where each has its own."""

import pytest
import torch
from helpers.models import checkpoints
from helpers.runs.engine_cases import assert_same_samples

import csd
from csd.engine.options.params import SamplingParams
from csd.engine.requests.request import Request
from csd.engine.step import prefill
from csd.engine.step.step import Step
from csd.kernels.attention.prompt import PromptChunk
from csd.models.load import load

LENGTHS = (5, 1, 130, 17, 64, 2, 65, 33)


def some_prompts(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]


def engine_of(dtype, **options):
    loaded = load(checkpoints.build("llama", dtype=dtype))
    # nothing else holds the module
    loaded.module = None
    return csd.Engine(loaded, **dict(max_slots=8, exact=True) | options)


@pytest.fixture
def passes(monkeypatch):
    """Tokens of the chunks of each pass over prompts, or "step", in order."""
    found = []
    read, forward = prefill.read_prompts, Step.forward

    def watched_read(step, parts):
        found.append([len(part.tokens) for part in parts])
        return read(step, parts)

    def watched_forward(self, pool):
        found.append("step")
        return forward(self, pool)

    monkeypatch.setattr(prefill, "read_prompts", watched_read)
    monkeypatch.setattr(Step, "forward", watched_forward)
    return found


def assert_same_bits(got, want):
    assert_same_samples([got], [want])
    assert got.logprobs == want.logprobs


def caches_of(engine, prompts, order):
    """Keys and values of each prompt, as read by passes of the prompts in `order`."""
    requests = [
        Request.of(i, p, SamplingParams(max_new_tokens=4), range(1), 0)
        for i, p in enumerate(prompts)
    ]
    step = engine.caches.prepare(requests, "consensus")
    cache = step.cache
    cache.reset()
    for part in cache.parts:
        part.k.fill_(float("nan"))
        part.v.fill_(float("nan"))
    pages = [cache.take(cache.prompt_pages, g, len(p), 512) for g, p in enumerate(prompts)]
    for together in order:
        prefill.read_prompts(step, [PromptChunk(g, prompts[g][a:b], a) for g, a, b in together])
    return [
        torch.cat([x[:, pages[g]].flatten(1, 2)[:, : len(p)].flatten() for x in cache.parts[0][:2]])
        for g, p in enumerate(prompts)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_keys_and_values_have_the_same_bits_in_every_pass(dtype):
    prompts = some_prompts((5, 130, 64))
    with engine_of(dtype) as engine:
        # chunks of 64, as a pass of its own reads them
        alone = [[(0, 0, 5)], [(1, 0, 64)], [(1, 64, 128)], [(1, 128, 130)], [(2, 0, 64)]]
        want = caches_of(engine, prompts, alone)
        orders = [
            [[(0, 0, 5), (1, 0, 64), (2, 0, 64)], [(1, 64, 128)], [(1, 128, 130)]],
            # first chunks beside later ones
            [[(1, 0, 64)], [(2, 0, 64), (1, 64, 128)], [(1, 128, 130), (0, 0, 5)]],
        ]
        for order in orders:
            for got, x in zip(caches_of(engine, prompts, order), want, strict=True):
                assert torch.equal(got, x) and not got.isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_samples_are_those_of_prompts_alone(dtype, passes):
    prompts = some_prompts()
    asked = dict(num_samples=2, max_new_tokens=12, seed=3, top_p=0.95, budget=4)
    with engine_of(dtype) as engine:
        together = engine.generate(prompts, **asked)
        assert passes[0] == [4, 129, 16, 63, 1, 64, 32]
        passes.clear()
        for prompt, out in zip(prompts, together, strict=True):
            assert_same_bits(out, engine.generate(prompt, **asked))
        assert max(len(found) for found in passes if found != "step") == 1


def test_a_pass_has_a_chunk_of_tokens_at_most(passes):
    """Prompts that have a slot, in order; while samples are in flight, so much between steps."""
    prompts = some_prompts((41, 31, 11, 21, 51, 31, 9))
    with engine_of(torch.float32, max_slots=4, prefill_chunk=64) as engine:
        out = engine.generate(
            prompts, num_samples=1, max_new_tokens=6, seed=1, budget=2, ignore_eos=True
        )
        # one of its own where the next does not fit
        assert passes[:3] == [[40], [30, 10, 20], "step"]
        last = passes.index([50])
        assert passes[3:last] == ["step"] * (last - 3)
        between = "".join("s" if x == "step" else "p" for x in passes[last:])
        assert "pp" not in between
        assert sum(sum(x) for x in passes if x != "step") == sum(len(p) - 1 for p in prompts)
    with engine_of(torch.float32, max_slots=1) as engine:
        assert_same_samples(
            engine.generate(
                prompts, num_samples=1, max_new_tokens=6, seed=1, budget=2, ignore_eos=True
            ),
            out,
        )


def test_prompts_wait_until_there_are_slots(passes):
    """Four samples of a prompt run together at first: no prompt is read before it has one."""
    with engine_of(torch.float32, max_slots=8, together=4) as engine:
        engine.generate(some_prompts(), num_samples=16, max_new_tokens=3, seed=1, budget=0)
    assert passes[0] == [4] and passes[1] == "step"


@pytest.mark.parametrize("what", ["prompt_logprobs", "history"])
def test_what_a_prompt_is_asked_for_is_its_own(what):
    prompts = some_prompts()
    given = {"prompt_logprobs": True}
    if what == "history":
        given = {"history": [[p[-3:] * 3] for p in prompts]}
    asked = dict(num_samples=2, max_new_tokens=8, seed=3)
    with engine_of(torch.float32) as engine:
        together = engine.generate(prompts, **asked, **given)
        for i, (prompt, out) in enumerate(zip(prompts, together, strict=True)):
            own = {k: v[i] if k == "history" else v for k, v in given.items()}
            alone = engine.generate(prompt, **asked, **own)
            assert_same_bits(out, alone)
            assert out.prompt_logprobs == alone.prompt_logprobs
            assert out.stats.history_tokens == alone.stats.history_tokens
