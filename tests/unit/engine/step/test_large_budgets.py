"""Integer budgets: cut to the nodes that trees have room for, and counted in `memory`."""

import pytest
from helpers.models.scripted import PrefixSum, engine

import csd
from csd.engine.resources import caches as resources
from csd.engine.step.budget import Budget, FixedPool
from csd.engine.step.static_step import sizes_for
from csd.research.verify.multi_draft import DRAWS
from csd.state.pool import MAX_NODES

OPTIONS = dict(num_samples=12, max_new_tokens=16, seed=3)
LARGE = [63, 700, 12 * 63, 12 * 63 + 1, 4_000_000_000, 2**31, 10**30]


def sure():
    # samples repeat each other, so that trees are drafted deep and wide
    return PrefixSum(vocab=8, sharpness=6.0)


@pytest.fixture(scope="module")
def expected():
    return csd.generate(engine(sure()), [1, 2], speculate=False, **OPTIONS).tokens


@pytest.mark.parametrize("static", [False, True], ids=["not static", "static"])
def test_calls_of_any_budget_draw_the_same(static, expected):
    made = engine(sure(), static=static)
    for budget in [*LARGE, 700, 63]:
        out = csd.generate(made, [1, 2], budget=budget, **OPTIONS)
        assert out.tokens == expected


@pytest.mark.parametrize("drafter", ["paper", "prompt-lookup", "suffix-tree", "recycling"])
def test_of_other_drafters_too(drafter, expected):
    made = engine(sure(), drafter=drafter)
    for budget in (700, 2**31):
        try:
            assert csd.generate(made, [1, 2], budget=budget, **OPTIONS).tokens == expected
        except ImportError:
            pytest.skip("a package of this drafter is not installed")


@pytest.mark.parametrize("verifier", DRAWS)
def test_and_of_verifiers_that_draw(verifier):
    made = engine(sure())
    options = OPTIONS | dict(verifier=verifier, temperature=0.9, max_new_tokens=5)
    most = csd.generate(made, [1, 2], budget=12 * 63, **options)
    assert csd.generate(made, [1, 2], budget=2**31, **options).tokens == most.tokens


def test_a_step_has_no_more_rows_than_its_trees():
    assert (
        Budget(2**31).num_draft_tokens(3) == Budget(2**31).pool_shape(3)[1] == 3 * (MAX_NODES - 1)
    )
    assert Budget(7).num_draft_tokens(3) == 7
    assert FixedPool(2**31, sizes_for(2)).pool_shape(2)[0] == 128
    assert FixedPool(2**31, sizes_for(64)).pool_shape(64) == (512, 512)


def test_their_rows_are_counted_in_memory(monkeypatch, expected):
    def bytes_of(budget):
        found = []
        plain = resources.slots_that_fit

        def noted(demand, wanted, room):
            found.append(demand(wanted).total)
            return plain(demand, wanted, room)

        with monkeypatch.context() as patch:
            patch.setattr(resources, "slots_that_fit", noted)
            csd.generate(engine(sure()), [1, 2], budget=budget, **OPTIONS)
        return found[0]

    assert bytes_of(8) == bytes_of(500) < bytes_of(700) < bytes_of(756) == bytes_of(2**31)
    made, room = engine(sure(), memory=1.0), bytes_of(8)
    monkeypatch.setattr(resources, "free_bytes", lambda device: room)
    # where they do not fit, fewer samples are in flight
    assert csd.generate(made, [1, 2], budget=2**31, **OPTIONS).tokens == expected
    assert made.caches.step.slots.count < 12
    monkeypatch.setattr(resources, "free_bytes", lambda device: 10_000)
    with pytest.raises(MemoryError, match="lower max_new_tokens"):
        csd.generate(engine(sure()), [1, 2], budget=2**31, **OPTIONS)


def test_a_chunk_has_no_more_rows_than_a_prompt(expected):
    made = engine(sure(), prefill_chunk=2**40)
    prompt = [1, 2] * 600
    assert csd.generate(made, [1, 2], **OPTIONS).tokens == expected
    long = csd.generate(made, prompt, **OPTIONS)
    assert long.tokens == csd.generate(engine(sure()), prompt, **OPTIONS).tokens
    # a power of two of rows, so that later calls seldom allocate
    assert made.caches.step.cache.node_k.shape[1] == 2048
