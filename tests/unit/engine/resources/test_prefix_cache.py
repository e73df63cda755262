"""Beginnings that earlier prompts have read: the bits of whole prompts, and when they go."""

import random
from contextlib import contextmanager

import pytest
import torch
from helpers.models import lora_models
from helpers.models.families import build
from helpers.runs.served import NAME, call, served
from helpers.targets import few

import csd
from csd.engine.resources import caches
from csd.engine.resources.sizes import ServedSizes
from csd.engine.step.prefill import Prefill
from csd.models.demo import toy
from csd.models.load import load
from csd.state.kv_cache import pages_for
from csd.state.prefix_cache import PageAllocator, PrefixIndex

CONTEXT = dict(max_position_embeddings=1024)
WINDOWS = CONTEXT | dict(
    sliding_window=70, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
)


@contextmanager
def memories():
    """Yields, by prompt, the contents of its pages and states at the end of its reading."""
    found = {}
    end = Prefill.end

    def noted(self):
        cache, request = self.step.cache, self.request
        tokens = len(request.prompt) - 1
        table = cache.prompt_pages[request.place.group, : pages_for(tokens)].long()
        held = [
            x[:, table].flatten(1, 2)[:, :tokens] for part in cache.parts for x in (part.k, part.v)
        ]
        if cache.states is not None and tokens:
            held += cache.states.prompts[request.place.group].of_slots()
        found[tuple(request.prompt)] = [x.clone() for x in held]
        end(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prefill, "end", noted)
        yield found


def fused(family, dtype, **changes):
    def make():
        loaded = load(build(family, dtype, **CONTEXT | changes), decoder="fused")
        # nothing else holds the module
        loaded.module = None
        return loaded

    return make


def plain_module(family, **changes):
    return lambda: build(family, **CONTEXT | changes)


def adapted():
    return lora_models.adapted(dtype=torch.float32)


BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
# model, options of the engine, tokens of a unit
DECODERS = {
    "llama bfloat16": (fused("llama", BF16), dict(exact=True), 64),
    "llama float32": (fused("llama", F32), dict(exact=True), 64),
    "llama in chunks of 100": (fused("llama", F32), dict(exact=True, prefill_chunk=100), 64),
    "llama in chunks of 128": (fused("llama", F32), dict(exact=True, prefill_chunk=128), 64),
    "llama float64": (fused("llama", F64), dict(prefill_chunk=64), 64),
    "llama not exact": (fused("llama", F32), dict(exact=False, prefill_chunk=128), 128),
    "windows": (fused("gemma3_text", F32, **WINDOWS), dict(exact=True), 64),
    "windows not exact": (fused("gemma3_text", F64, **WINDOWS), dict(prefill_chunk=64), 64),
    "experts": (fused("qwen3_moe", F32), dict(exact=True), 64),
    "hybrid": (fused("qwen3_5_text", F32), dict(exact=True, prefill_chunk=64), 64),
    "hybrid in chunks of 128": (fused("qwen3_5_text", F32), dict(prefill_chunk=128), 128),
    "module": (plain_module("llama"), dict(decoder="module", prefill_chunk=64), 64),
    "module with windows": (plain_module("gemma2", **WINDOWS), dict(prefill_chunk=64), 64),
    "module hybrid": (plain_module("bamba"), dict(decoder="module", prefill_chunk=128), 128),
}


def pairs(seed, count, longest):
    """Prompts of at most `longest` tokens, of which each but the first begins like an earlier one;
    and the longest beginning that each has in common with one before it."""
    draw = random.Random(seed)
    prompts, common = [], []
    for _ in range(count):
        beginning = []
        if prompts:
            beginning = draw.choice(prompts)
            beginning = beginning[: draw.randrange(len(beginning) + 1)]
        new = draw.choice((0, 1, 63, 64, 65, draw.randrange(longest)))
        prompt = (beginning + [draw.randrange(61) for _ in range(new)])[:longest]
        prompts.append(prompt or [draw.randrange(61)])
        common.append(max((shared(prompts[-1], p) for p in prompts[:-1]), default=0))
    return prompts, common


def shared(a, b):
    """Number of tokens, before the last of each, that both begin with."""
    n = min(len(a), len(b)) - 1
    return next((i for i in range(n) if a[i] != b[i]), n)


ASKED = dict(num_samples=2, max_new_tokens=3, seed=5, budget=2, temperature=0.8, end_token_ids=[])


@few(2)
@pytest.mark.parametrize("how", DECODERS)
@pytest.mark.parametrize("seed", range(6))
def test_reused_beginnings_have_the_bits_of_prompts_read_whole(how, seed):
    make, options, unit = DECODERS[how]
    prompts, common = pairs(seed, 7, 330)
    with (
        csd.Engine(make(), max_slots=4, prefix_cache=False, **options) as engine,
        memories() as want,
    ):
        whole = [engine.generate(prompt, **ASKED) for prompt in prompts]
        assert not any(out.stats.cached_tokens for out in whole)
    with csd.Engine(make(), max_slots=4, **options) as engine, memories() as got:
        assert engine.caches.unit == unit
        alone = [engine.generate(prompt, **ASKED) for prompt in prompts]
        for out, n, wanted in zip(alone, common, whole, strict=True):
            assert out.stats.cached_tokens == n // unit * unit
            assert (out.tokens, out.logprobs) == (wanted.tokens, wanted.logprobs)
        assert_same_memories(got, want)
    # in one call, whose prompts are read in any order and several at a time
    with csd.Engine(make(), max_slots=4, **options) as engine, memories() as got:
        together = engine.generate(prompts, **ASKED)
        assert_same_memories(got, want)
        if engine.exact:
            for out, wanted in zip(together, whole, strict=True):
                assert out.tokens[0] == wanted.tokens[0]
        read = sum(len(out.prompt_ids) - 1 - out.stats.cached_tokens for out in together)
        assert read <= whole_units_once(prompts, unit)
        assert len(engine.caches.step.cache.allocator) == engine.caches.step.cache.pages


def whole_units_once(prompts, unit):
    """Tokens to read if each whole unit is read once."""
    units, rest = set(), 0
    for prompt in prompts:
        n = (len(prompt) - 1) // unit
        units |= {tuple(prompt[: i * unit]) for i in range(1, n + 1)}
        rest += len(prompt) - 1 - n * unit
    return len(units) * unit + rest


def assert_same_memories(got, want):
    assert got.keys() == want.keys()
    for prompt, held in got.items():
        for x, y in zip(held, want[prompt], strict=True):
            assert torch.equal(x, y)


def test_a_prompt_longer_than_the_only_window_is_read_whole():
    """Its pages are overwritten while it is read; a shorter one's are not."""
    window = CONTEXT | dict(sliding_window=70)
    options = dict(max_slots=2, exact=True, prefill_chunk=64)
    prompts, _ = pairs(1, 1, 330)
    prompts = [(prompts[0] * 330)[:n] for n in (300, 130, 129, 310)]
    with csd.Engine(fused("mistral", F32, **window)(), prefix_cache=False, **options) as engine:
        want = [engine.generate(prompt, **ASKED) for prompt in prompts]
    with csd.Engine(fused("mistral", F32, **window)(), **options) as engine:
        assert engine.decoder.config.reach == 70
        out = [engine.generate(prompt, **ASKED) for prompt in prompts]
    assert [x.logprobs for x in out] == [x.logprobs for x in want]
    assert [x.stats.cached_tokens for x in out] == [0, 0, 128, 0]


PROMPT = [(7 * i + 3) % 61 for i in range(200)]


def drawn(model, **options):
    with csd.Engine(model, prefill_chunk=64, **options) as engine:
        return engine.generate(PROMPT, **ASKED)


def in_place(model):
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)


def through_data(model):
    for weight in model.parameters():
        weight.data.mul_(1.01)


def one_matrix_through_data(model):
    weight = model.model.layers[1].self_attn.v_proj.weight.data
    weight += 0.3


def optimizer_step(model):
    chosen = [*model.parameters()]
    optimizer = torch.optim.AdamW(chosen, lr=0.05)
    model(torch.tensor([PROMPT[:9]]), labels=torch.tensor([PROMPT[:9]])).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def other_weights(model):
    model.load_state_dict(build("llama", F32, seed=1, **CONTEXT).state_dict())


@pytest.mark.parametrize("decoder", ["fused", "module"])
@pytest.mark.parametrize(
    "change", [in_place, through_data, one_matrix_through_data, optimizer_step, other_weights]
)
def test_changed_weights_drop_what_they_did_not_read(change, decoder):
    model = build("llama", F32, **CONTEXT)
    with csd.Engine(model, prefill_chunk=64, decoder=decoder) as engine:
        before = engine.generate(PROMPT, **ASKED)
        assert engine.generate(PROMPT, **ASKED).stats.cached_tokens == 192
        change(model)
        after = engine.generate(PROMPT, **ASKED)
        assert after.stats.cached_tokens == 0
        assert engine.generate(PROMPT, **ASKED).stats.cached_tokens == 192
    assert after.logprobs != before.logprobs
    assert after.logprobs == drawn(model, prefix_cache=False, decoder=decoder).logprobs


@pytest.mark.parametrize("decoder", ["fused", "module"])
def test_another_adapter_drops_what_it_did_not_read(decoder):
    model = lora_models.adapted(dtype=torch.float32)
    prompt = PROMPT[:110]
    with csd.Engine(model, prefill_chunk=64, decoder=decoder) as engine:
        found = {}
        for name in ("default", "other", "default"):
            model.set_adapter(name)
            first, second = (engine.generate(prompt, **ASKED) for _ in range(2))
            assert (first.stats.cached_tokens, second.stats.cached_tokens) == (0, 64)
            assert first.logprobs == second.logprobs == found.setdefault(name, first.logprobs)
        assert found["default"] != found["other"]
        with model.disable_adapter():
            plain = engine.generate(prompt, **ASKED)
        assert plain.stats.cached_tokens == 0 and plain.logprobs not in found.values()


def test_a_call_that_fails_keeps_whole_units_only():
    prompts = [PROMPT, [*PROMPT[:150], 1, 2, 3]]
    with csd.Engine(fused("llama", F32)(), exact=True, max_slots=2) as engine, memories() as got:

        def fails(prefill, hidden):
            raise KeyError("before the chunk is kept")

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyError):
            patch.setattr(Prefill, "finish_chunk", fails)
            engine.generate(prompts[0], **ASKED)
        assert len(engine.caches.step.cache.allocator) == engine.caches.step.cache.pages
        out = [engine.generate(prompt, **ASKED) for prompt in prompts]
        assert [x.stats.cached_tokens for x in out] == [0, 128]
    plain = csd.Engine(fused("llama", F32)(), exact=True, prefix_cache=False)
    with plain as engine, memories() as want:
        for prompt in prompts:
            engine.generate(prompt, **ASKED)
    assert_same_memories(got, want)


@pytest.mark.parametrize("scored", [False, True])
def test_scored_prompts_are_read_whole(scored):
    with csd.Engine(fused("llama", F32)(), exact=True) as engine:
        first, again = (engine.generate(PROMPT, prompt_logprobs=scored, **ASKED) for _ in range(2))
    assert again.stats.cached_tokens == (0 if scored else 192)
    assert again.prompt_logprobs == first.prompt_logprobs and again.tokens == first.tokens


def test_caches_that_grow_keep_the_beginnings():
    """A chat whose turns are longer each time: only the new tokens are read."""
    options = dict(ASKED, num_samples=1)
    with csd.Engine(fused("llama", F32)(), exact=True, max_slots=2) as engine:
        text, read = PROMPT[:70], []
        for turn in range(8):
            out = engine.generate(text, **options)
            read.append(len(text) - 1 - out.stats.cached_tokens)
            text = text + out[0].tokens + [turn] * 80
        assert max(read[1:]) <= 83 + 63


def test_ten_thousand_prompts_take_no_more_memory_than_their_pages():
    allocator = PageAllocator(40)
    allocator.index = index = PrefixIndex(64, 1)
    draw = random.Random(0)
    live = []
    for i in range(10_000):
        prompt = [i % 7] * 64 + [draw.randrange(50) for _ in range(64 * draw.randrange(1, 5))]
        digests = index.digests("", prompt)
        found = [page for unit in index.find(digests) for page in unit.pages]
        while len(digests) - len(found) > len(allocator) - index.idle_pages and live:
            allocator.give_back(live.pop(draw.randrange(len(live))))
            found = [page for unit in index.find(digests) for page in unit.pages]
        allocator.share(found)
        pages = found + allocator.take(len(digests) - len(found))
        assert len({*pages}) == len(pages)
        for digest, page in zip(digests, pages, strict=True):
            allocator.keep(digest, [page])
        live.append(pages)
        assert len(index) <= 40 and len(index._of) == len(index) and len(index._idle) <= len(index)
        # a page is free, idle, or has an owner
        owned = {page for pages in live for page in pages}
        assert len(allocator) + len(owned) == 40
    allocator.give_back_all()
    assert len(allocator) == 40
    allocator.forget_all()
    assert allocator.take(40) == [*range(40)] and len(index) == 0


def test_a_full_index_of_states_evicts_and_the_bits_stay():
    make, options, _ = DECODERS["hybrid"]
    prompts, _ = pairs(3, 8, 330)
    with csd.Engine(make(), prefix_cache=False, **options) as engine, memories() as want:
        for prompt in prompts:
            engine.generate(prompt, **ASKED)
    with csd.Engine(make(), **options) as engine, memories() as got:
        engine.generate(prompts[0], **ASKED)
        index = engine.caches.step.cache.allocator.index
        index.limit = 3
        for prompt in prompts:
            engine.generate(prompt, **ASKED)
            assert len(index) <= 3
    assert_same_memories(got, want)


def test_owners_of_a_service_share_with_themselves_alone():
    with csd.AsyncEngine(fused("llama", F32)(), exact=True, max_slots=2) as service:
        asked = dict(num_samples=1, max_new_tokens=2, seed=1)

        def cached(owner, end):
            reader = service.submit([*PROMPT, end], owner=owner, **asked)
            reader.result()
            return reader.request.progress.stats.cached_tokens

        assert [cached("a", 1), cached("a", 2), cached("b", 3), cached("b", 4)] == [0, 192, 0, 192]
        assert [cached(None, 5), cached(None, 6), cached("a", 7)] == [0, 0, 192]
        counters = service.counters
        assert counters.cached_prompt_tokens == 3 * 192
        assert counters.prompt_tokens == 7 * 201 - 3 * 192
    assert len(service.engine.caches.step.cache.allocator) == service.engine.caches.step.cache.pages


@pytest.mark.parametrize("shares", [False, True])
def test_usage_over_http_counts_cached_tokens_within_a_key_or_with_share(shares):
    model, tokenizer = toy()
    options = dict(tokenizer=tokenizer, max_slots=4, max_tokens=400, prefill_chunk=64)
    keys = () if shares else ("one", "two")
    prompt = [3 + i % 20 for i in range(150)]

    def usage(port, key):
        body = dict(model=NAME, prompt=prompt, max_tokens=2, n=2)
        status, answer = call(port, "/v1/completions", body, key)
        assert status == 200, answer
        details = answer["usage"]["prompt_tokens_details"]
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        return details["cached_tokens"]

    with served(model.double(), keys=keys, shares=shares, **options) as (port, _):
        order = [None] * 2 if shares else ["one", "one", "two"]
        assert [usage(port, key) for key in order] == [0, 128, 0][: len(order)]
        status, text = call(port, "/metrics", key=order[0])
        assert status == 200 and "csd_cached_prompt_tokens_total 128" in text
        assert "csd_cached_pages" in text
    with served(model, **options) as (port, _):
        # without a key and without --share, nobody's pages are another's
        assert [usage(port, None), usage(port, None)] == [0, 0]


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("kind", ["llama not exact", "hybrid"])
def test_whatever_share_the_cache_has_a_longest_text_is_served(monkeypatch, kind, slots):
    """One is served in as much memory as without a cache; else the start names what is short."""
    make, options, _ = DECODERS[kind]
    model, asked = make(), dict(num_samples=2, max_new_tokens=4, seed=1)
    wanted, frees = len(PROMPT) + 70, [1 << i for i in range(12, 28)]

    def engine(share):
        return csd.Engine(model, max_slots=slots, memory=1.0, prefix_cache=share, **options)

    def longest(share):
        """Longest text that is served, for each free memory; 0 if none is."""
        found = []
        with engine(share) as made:
            for free in frees:
                monkeypatch.setattr(caches, "free_bytes", lambda _, free=free: free)
                made.caches.drop()
                sizes = ServedSizes(wanted)
                try:
                    made.caches.prepare_served(sizes, "consensus", 4)
                except MemoryError as error:
                    assert "lower max_slots, max_tokens or prefill_chunk, or raise" in str(error)
                found.append(sizes.longest)
        return found

    by_free = longest(False)
    assert by_free[0] == 0 and by_free[-1] == wanted
    for share in (0, 0.1, 0.999, 1):
        assert longest(share) == by_free
    least = frees[by_free.index(wanted)]
    monkeypatch.setattr(caches, "free_bytes", lambda _: 1 << 30)
    with engine(False) as plain:
        want = plain.generate(PROMPT, **asked).tokens
    monkeypatch.setattr(caches, "free_bytes", lambda _: least)
    with csd.AsyncEngine(engine(1.0), max_tokens=wanted, budget=4) as service:
        for _ in range(2):
            assert service.submit(PROMPT, owner="a", **asked).result(60).tokens == want
