"""Attention of a module's layers by the kernels of every backend, without a host read."""

from dataclasses import replace

import pytest
import torch
from helpers.checks.host_reads import NoHostReads
from helpers.models.families import build
from helpers.oracles import oracle
from helpers.targets import slow

import csd
from csd.kernels.ops import exact_triton, triton

PROMPT = [(7 * i + 3) % 61 for i in range(20)]
# a window in some layers and a cap; a window and sinks; keys and values of two sizes
FAMILIES = ("gemma2", "granite_swa", "deepseek_v3")


def drawn(model, kernels, tokens):
    """Tokens by csd's kernels and by plain sampling, and the engine."""
    want = oracle.generate(model, PROMPT, seed=4, sample=0, max_new_tokens=tokens, temperature=0.7)
    engine = csd.Engine(model, decoder="module", kernels=kernels)
    out = engine.generate(
        PROMPT, seed=4, max_new_tokens=tokens, temperature=0.7, budget=8, end_token_ids=[]
    )
    return out.tokens, [want[0]], engine


@pytest.mark.parametrize("name", FAMILIES)
def test_references_draw_the_tokens_of_plain_sampling(name):
    """`test_modules.py` has the loops."""
    got, want, _ = drawn(build(name), "reference", 6)
    assert got == want


@slow
@pytest.mark.parametrize("name", FAMILIES)
def test_so_do_interpreted_kernels(name):
    got, want, _ = drawn(build(name, dtype=torch.float32), "triton", 5)
    assert got == want


@pytest.mark.parametrize("name", FAMILIES)
def test_a_forward_pass_reads_nothing_on_the_host(name):
    """Its logits are the reference's, within the roundings of float32."""
    *_, engine = drawn(build(name, dtype=torch.float32), "reference", 1)
    step = engine.caches.step
    # the sample that was drawn, whose pages are free but hold what they held
    step.slots.group.zero_(), step.slots.live.fill_(True)
    step.cache.prompt_pages.zero_(), step.cache.slot_pages.fill_(1)
    pool = step.ops.roots(step.slots, step.slots.count)
    want = step.forward(pool)
    for ops in (triton(), exact_triton()):
        step.ops = replace(
            step.ops, plan_attention=ops.plan_attention, tree_attention=ops.tree_attention
        )
        # a router of eager experts reads the host, and is not csd's
        with NoHostReads() if name != "deepseek_v3" else torch.no_grad():
            got = step.forward(pool)
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def long_texts(model, reach):
    """Log-probabilities of two samples whose texts are longer than a window, and pages taken."""
    engine = csd.Engine(model, decoder="module", prefill_chunk=64, prefix_cache=False)
    engine.decoder.config = replace(engine.decoder.config, reach=reach)
    out = engine.generate(
        PROMPT * 13,
        num_samples=2,
        seed=4,
        max_new_tokens=150,
        temperature=0.7,
        budget=8,
        end_token_ids=[],
    )
    cache = engine.caches.step.cache
    assert len(cache.allocator) == cache.pages
    return [x for sample in out for x in sample.logprobs], cache.pages


def test_pages_behind_every_window_are_used_again():
    model = build("mistral", max_position_embeddings=512, sliding_window=66)
    assert csd.Engine(model, decoder="module").decoder.config.reach == 66
    want, whole = long_texts(model, None)
    got, few = long_texts(model, 66)
    # of a prompt and two samples
    assert (whole, few) == (5 + 2 * 3, 3 + 2 * 2) and got == pytest.approx(want, abs=1e-9)
    # a key too few: the last of a row's is written over
    got, fewer = long_texts(model, 65)
    assert fewer == 2 + 2 * 1 and got != pytest.approx(want, abs=1e-3)


def test_pages_are_kept_where_a_layer_sees_all():
    engine = csd.Engine(build("gemma2"), decoder="module")
    assert engine.decoder.config.reach is None
