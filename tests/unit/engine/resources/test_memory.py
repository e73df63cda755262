"""Slots are as many as fit; a request that cannot fit is refused with the numbers."""

import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers.checks.live_bytes import LiveBytes
from helpers.models.scripted import LastToken, PrefixSum, engine
from helpers.oracles.grammar_oracle import Pieces
from helpers.targets import few, slow

import csd
from bench.lib.shapes import SHAPES
from csd.engine.options.params import SamplingParams
from csd.engine.requests.request import Request
from csd.engine.resources import caches as resources
from csd.engine.resources.sizes import CacheSizes, Demand, slots_that_fit
from csd.engine.rules.changes import Changes
from csd.engine.rules.tables import changed_bytes
from csd.models.demo import toy
from csd.state.kv_cache import KVCache, pages_for
from csd.state.logit_rules import RuleKinds
from csd.state.prefix_cache import PageAllocator
from csd.utils.device import free_bytes, peak_bytes

LLAMA = SHAPES["llama-3.1-8b"]
# a GPU of 80 GB, of which the engine takes nine tenths of what the weights leave
ROOM = int(0.9 * (80e9 - 16.06e9))


def demand(new_tokens, prompt=1024, groups=1):
    def of(slots):
        slot, prompt_pages = pages_for(new_tokens), pages_for(prompt)
        sizes = CacheSizes(slots, groups, slot, prompt_pages, slot, prompt_pages)
        return Demand.of(LLAMA, torch.bfloat16, sizes, slots + 512)

    return of


def test_an_8b_model_on_80_gb():
    """256 samples of a prompt of 1,024: 1,024 new tokens each fit at once, 2,048 do not."""
    need = demand(1024)(256)
    # 128 KiB a token
    assert need.new == 256 * 1024 * (128 << 10) and need.prompts == 1024 * (128 << 10)
    need.check(ROOM)
    assert slots_that_fit(demand(1024), 256, ROOM) == 256
    words = r"\(256\) need .* GB .*68.72 GB .* new tokens, 134.2 MB .* for a step.*57.55 GB may"
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
    words = r"\(1\) need .* \(8.4 MB .*134.2 MB .* for a step\), but only 100.0 MB may be used"
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
    sizes = CacheSizes(slots=2, groups=1, slot_pages=1, prompt_pages=1, slot_held=1, prompt_held=1)
    two = Demand.of(model.config, torch.float64, sizes, short.caches.rows(2), gathers)
    assert two.new + two.prompts == 3 * page
    monkeypatch.setattr(resources, "free_bytes", lambda device: two.total)
    assert csd.generate(short, [1, 2], **options).tokens == expected.tokens
    assert short.caches.step.slots.count == 2
    monkeypatch.setattr(resources, "free_bytes", lambda device: two.step)
    with pytest.raises(MemoryError, match=r"\(1\) need"):
        csd.generate(engine(model, kernels=kernels), [1, 2], **options)


TAGS = [[3], [4, 5], [6, 4, 5]]
CHANGES = {
    "bias": dict(logit_bias={3: 1.5}),
    "words": dict(bad_words=[[3, 4], [5]], no_repeat_ngram_size=3),
    "penalty": dict(repetition_penalty=1.3, presence_penalty=0.4, min_new_tokens=3),
    "thought": dict(max_thinking_tokens=4, thinking_tags=TAGS),
    "functions": dict(logits_processor=lambda ids, x: x + 1),
    "grammar": dict(regex="[a-f]+", max_thinking_tokens=4, thinking_tags=TAGS),
}
CHANGES["all"] = {name: value for given in CHANGES.values() for name, value in given.items()}


@few(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", CHANGES.values(), ids=CHANGES)
def test_what_changes_rows_takes_no_more_than_is_counted(monkeypatch, options, dtype):
    """Nor much less, for a step with more rows than a block and a vocabulary of 3,000."""
    if "regex" in options:
        pytest.importorskip("llguidance")
    vocab = 3000

    def logits_of(token, position):
        return torch.randn(token.shape[0], vocab, dtype=dtype)

    found, plain = [], Changes.decide

    def watched(self, ops, logits, pool, slots, *flags):
        live = LiveBytes()

        def unwatched(name):
            def call(*args, **kwargs):
                with live.pause():
                    return getattr(ops, name)(*args, **kwargs)

            return call

        names = ("verify", "finish")
        own = SimpleNamespace(log_sum=ops.log_sum, **{name: unwatched(name) for name in names})
        with live:
            verdict = plain(self, own, logits, pool, slots, *flags)
        sizes = self.sizes.sets, pool.rows, 3 * 64, vocab
        counted = changed_bytes(self.asked, *sizes, dtype)
        found.append((live.peak, counted, pool.rows))
        return verdict

    monkeypatch.setattr(Changes, "decide", watched)
    made = engine(LastToken(logits_of, vocab), kernels="reference")
    csd.generate(
        made,
        [3, 4, 5, 3, 4],
        num_samples=5,
        max_new_tokens=12,
        seed=1,
        budget=80,
        history=[[3, 4, 5, 6, 7, 8, 9, 3, 4, 5]] * 3,
        tokenizer=Pieces(),
        **options,
    )
    assert max(rows for *_, rows in found) > 64
    for peak, counted, rows in found:
        assert rows * vocab * dtype.itemsize <= peak <= counted < 5 * peak


def test_what_changes_rows_is_counted(monkeypatch):
    """In what an engine may take, also where its caches are there already."""
    with engine(PrefixSum(), max_slots=4, memory=1.0) as made:
        draw = partial(csd.generate, made, [1, 2], seed=0, budget=2, num_samples=4)
        plain = draw(max_new_tokens=64).tokens, made.caches.demand.total
        draw(max_new_tokens=64, logit_bias={3: 1.0})
        assert made.caches.demand.total == plain[1]
        rows = made.caches.step.cache.node_k.shape[1]
        extra = changed_bytes(RuleKinds(bias=True), 1, rows, 3 * 64, 32, torch.float64)
        assert extra > rows * 32 * 8
        made.release()
        draw(max_new_tokens=64, logit_bias={3: 1.0})
        assert made.caches.demand.total == plain[1] + extra
        made.release()
        draw(max_new_tokens=64)
        # what is left is too little for the copy: the caches make room for it
        monkeypatch.setattr(resources, "free_bytes", lambda device: extra - 1)
        with pytest.raises(MemoryError, match=r"\(1\) need"):
            draw(max_new_tokens=64, logit_bias={3: 1.0})


def test_free_memory_is_read():
    assert free_bytes(torch.device("cpu")) > 2**20


def test_memory_of_a_gpu(monkeypatch):
    """Memory of a dropped cache that torch holds is free for the next; the peak is torch's."""
    readings = dict(
        mem_get_info=(3, 80), memory_reserved=50, memory_allocated=40, max_memory_allocated=47
    )
    for name, value in readings.items():
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
    with pytest.raises(MemoryError, match="1 pages were requested, but only 0 are free"):
        pages.take(1)


def test_no_pages_are_taken_where_none_are_free():
    """A prompt of one token needs no page, also while samples hold all of them."""
    pages = PageAllocator(2)
    assert pages.take(2) == [0, 1]
    assert pages.take(0) == []
    with pytest.raises(MemoryError, match="1 pages were requested, but only 0 are free"):
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
    made, plain = [], engine.caches.allocate

    def noted(*args, **options):
        made.append(args)
        return plain(*args, **options)

    monkeypatch.setattr(engine.caches, "allocate", noted)
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
            made.caches.prepare([request], "consensus")

        for call in calls:
            draw(*call)
        assert 0 < len(found) <= 12
        found.clear()
        for call in random.Random(-seed).sample(SIZES, len(SIZES)):
            draw(*call)
        assert not found


MIXED = 200


def mixed_calls(seed):
    """Samples, new tokens and prompt tokens of calls in no order."""
    draw = random.Random(seed)
    sizes = (4, 8, 16), (256, 512, 1024), range(60, 1501)
    return [tuple(map(draw.choice, sizes)) for _ in range(MIXED)]


@pytest.mark.parametrize("seed", range(4))
def test_mixed_calls_seldom_allocate(monkeypatch, seed):
    """At most three times after the tenth; a growth that follows each longest prompt takes more."""
    with engine(PrefixSum(), max_slots=64) as made:
        found = allocations(monkeypatch, made)
        made_by = []
        for n, new, prompt in mixed_calls(seed):
            params = SamplingParams(max_new_tokens=new)
            made.caches.prepare([Request.of(0, [1] * prompt, params, range(n), 0)], "consensus")
            made_by.append(len(found))
        assert 0 < made_by[9] <= 8
        assert made_by[-1] - made_by[9] <= 3


@slow
def test_caches_do_not_grow_beyond_memory(monkeypatch):
    """If both sizes do not fit, the call at hand gets its own; one with too few slots keeps
    its caches for the next."""
    with engine(PrefixSum(), max_slots=4, memory=1.0) as made:
        draw = partial(csd.generate, made, [1, 2], seed=0, budget=2)
        few = [draw(num_samples=1, max_new_tokens=400).tokens, made.caches.demand.total]
        many = [draw(num_samples=4, max_new_tokens=64).tokens, made.caches.demand.total]
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
        assert wide[0] == wide[2] and made.caches.step.slots.count < 4
        assert len(found) == 1
