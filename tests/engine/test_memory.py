"""Slots are as many as fit; a request that cannot fit is refused with the numbers."""

import random
from functools import partial

import pytest
import torch
from scripted import PrefixSum, engine

import csd
from bench.lib.shapes import SHAPES
from csd.engine import resources
from csd.engine.memory import Demand, slots_that_fit
from csd.engine.requests import Request
from csd.engine.sampling import SamplingParams
from csd.models.demo import toy
from csd.state.device import free_bytes, peak_bytes
from csd.state.kv_cache import KVCache, PageAllocator, pages_for

LLAMA = SHAPES["llama-3.1-8b"]
# a GPU of 80 GB, of which the engine takes nine tenths of what the weights leave
ROOM = int(0.9 * (80e9 - 16.06e9))


def demand(new_tokens, prompt=1024, groups=1):
    def of(slots):
        return Demand.of(
            LLAMA, torch.bfloat16, slots=slots, groups=groups, slot_pages=pages_for(new_tokens),
            prompt_pages=pages_for(prompt), rows=slots + 512,
        )  # fmt: skip

    return of


def test_an_8b_model_on_80_gb():
    """256 samples of a prompt of 1,024: 1,024 new tokens each fit at once, 2,048 do not."""
    need = demand(1024)(256)
    # 128 KiB a token
    assert need.new == 256 * 1024 * (128 << 10) and need.prompts == 1024 * (128 << 10)
    need.check(ROOM)
    assert slots_that_fit(demand(1024), 256, ROOM) == 256
    words = "256 at once need .* GB .*68.72 GB .* new tokens, 134.2 MB .* for a step.*57.55 GB may"
    with pytest.raises(MemoryError, match=words):
        demand(2048)(256).check(ROOM)
    # in turns they can be drawn
    slots = slots_that_fit(demand(2048), 256, ROOM)
    assert demand(2048)(slots).total <= ROOM < demand(2048)(slots + 1).total


def test_every_slot_counts_with_its_groups_prompt():
    page = KVCache.bytes_per_page(LLAMA, torch.bfloat16)
    step = demand(64)(1).step
    assert demand(128, 192, groups=9)(4).total == 4 * (2 + 3) * page + demand(64)(4).step
    assert demand(128, 192, groups=1)(4).prompts == demand(128, 192, groups=9)(1).prompts
    assert step < demand(64)(4).step


def test_what_cannot_fit_is_refused_with_the_numbers():
    words = r"1 at once need .* \(8.4 MB .*134.2 MB .* for a step\), 100.0 MB may be taken"
    with pytest.raises(MemoryError, match=words):
        slots_that_fit(demand(64), 4, 100_000_000)


@pytest.mark.parametrize("kernels, gathers", [("reference", True), (None, False)])
def test_an_engine_short_of_memory_takes_fewer_slots(monkeypatch, kernels, gathers):
    """The references copy the keys that they attend to, and the loops do not."""
    model = PrefixSum(sharpness=4.0)
    options = dict(num_samples=6, max_new_tokens=40, seed=3)
    expected = csd.generate(engine(model), [1, 2], **options)
    assert expected.stats.peak_memory is None
    short = engine(model, memory=1.0, kernels=kernels)
    page = KVCache.bytes_per_page(model.config, torch.float64)
    # three pages: the prompt's and two slots'
    two = Demand.of(
        model.config, torch.float64, slots=2, groups=1, slot_pages=1, prompt_pages=1,
        rows=short._rows(2), gathers=gathers,
    )  # fmt: skip
    assert two.new + two.prompts == 3 * page
    monkeypatch.setattr(resources, "free_bytes", lambda device: two.total)
    assert csd.generate(short, [1, 2], **options).tokens == expected.tokens
    assert short._step.slots.count == 2
    monkeypatch.setattr(resources, "free_bytes", lambda device: two.step)
    with pytest.raises(MemoryError, match="1 at once need"):
        csd.generate(engine(model, kernels=kernels), [1, 2], **options)


def test_free_memory_is_read():
    assert free_bytes(torch.device("cpu")) > 2**20


def test_memory_of_a_gpu(monkeypatch):
    """What a dropped cache has left to torch is free for the next; the peak is what torch says."""
    told = dict(mem_get_info=(3, 80), memory_reserved=50, memory_allocated=40,
                max_memory_allocated=47)  # fmt: skip
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    device = torch.device("cuda", 0)
    assert free_bytes(device) == 13
    assert peak_bytes(device) == 47 and peak_bytes(torch.device("cpu")) is None


def test_pages_are_neighbours_where_they_can_be():
    pages = PageAllocator(8)
    a, b = pages.take(3), pages.take(2)
    pages.give_back(a)
    assert pages.take(2) == [0, 1]
    assert pages.take(3) == [5, 6, 7]
    pages.give_back(b)
    assert pages.take(3) == [2, 3, 4]
    with pytest.raises(MemoryError, match="1 pages asked for, 0 are free"):
        pages.take(1)


def test_no_pages_are_taken_where_none_are_free():
    """A prompt of one token needs no page, also while samples hold all of them."""
    pages = PageAllocator(2)
    assert pages.take(2) == [0, 1]
    assert pages.take(0) == []
    with pytest.raises(MemoryError, match="1 pages asked for, 0 are free"):
        pages.take(1)


def test_prompts_of_one_token_are_admitted_when_no_page_is_free():
    model, tokenizer = toy()
    engine = csd.Engine(model, tokenizer=tokenizer, max_slots=2)
    prompts = ["hello", "world", "a", "there", "b"]
    # with these seeds samples end such that the prompt of one token meets full pages
    for seed in (1, 6):
        together = engine.generate(prompts, max_new_tokens=40, seed=seed)
        alone = [engine.generate(p, max_new_tokens=40, seed=seed) for p in prompts]
        assert [out.tokens for out in together] == [out.tokens for out in alone]


def allocations(monkeypatch, engine):
    """A list that grows with each cache that `engine` makes."""
    made, plain = [], engine._allocate

    def noted(*args):
        made.append(args)
        return plain(*args)

    monkeypatch.setattr(engine, "_allocate", noted)
    return made


SIZES = [(n, new, prompt) for n in (1, 3, 6) for new in (8, 100, 300) for prompt in (5, 80, 200)]


@pytest.mark.parametrize("seed", range(3))
def test_calls_that_were_made_before_allocate_nothing(monkeypatch, seed):
    """In whatever order they come: caches only grow. And they seldom do."""
    calls = random.Random(seed).sample(SIZES, len(SIZES))
    with engine(PrefixSum(), max_slots=6) as made:
        found = allocations(monkeypatch, made)

        def draw(n, new, prompt):
            params = SamplingParams(max_new_tokens=new)
            request = Request.of(0, [1] * prompt, params, range(n), 0)
            made._prepare([request], "consensus")

        for call in calls:
            draw(*call)
        assert 0 < len(found) <= 12
        found.clear()
        for call in random.Random(-seed).sample(SIZES, len(SIZES)):
            draw(*call)
        assert not found


def test_caches_do_not_grow_beyond_memory(monkeypatch):
    """If both sizes do not fit, the call at hand gets its own; one with too few slots keeps
    its caches for the next."""
    with engine(PrefixSum(), max_slots=4, memory=1.0) as made:
        draw = partial(csd.generate, made, [1, 2], seed=0, budget=2)
        few = [draw(num_samples=1, max_new_tokens=400).tokens, made.demand.total]
        many = [draw(num_samples=4, max_new_tokens=64).tokens, made.demand.total]
        made.release()
        free = max(few[1], many[1])
        monkeypatch.setattr(resources, "free_bytes", lambda device: free)
        found = allocations(monkeypatch, made)
        for _ in range(2):
            assert draw(num_samples=1, max_new_tokens=400).tokens == few[0]
            assert draw(num_samples=4, max_new_tokens=64).tokens == many[0]
        assert len(found) == 4
        found.clear()
        wide = [draw(num_samples=4, max_new_tokens=400).tokens for _ in range(3)]
        assert wide[0] == wide[2] and made._step.slots.count < 4
        assert len(found) == 1
