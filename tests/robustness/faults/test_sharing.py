"""Engines and results in threads, event loops, children and copies; models that go on to change."""

import asyncio
import copy
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from faults import assert_usable, times
from helpers.models.checkpoints import build
from helpers.models.scripted import Letters, PrefixSum, engine
from transformers import AutoModelForCausalLM

import csd
from csd.models.demo import toy

PROMPTS = ["abcabc", "hello", "a", "there is no more to say", "zz", "abab", "why", "b!"]
OPTIONS = dict(num_samples=3, max_new_tokens=12, seed=4, budget=8)


def fresh(**options):
    return engine(PrefixSum(sharpness=8.0), Letters(), max_slots=4, **options)


@pytest.fixture(scope="module")
def expected():
    return [csd.generate(fresh(), p, **OPTIONS).tokens for p in PROMPTS]


def test_one_engine_from_eight_threads(expected):
    e = fresh()

    def call(i):
        place = i % len(PROMPTS)
        if i % 3 == 0:
            # some streams are left half way
            events = csd.stream(e, PROMPTS[place], **OPTIONS)
            next(events)
            events.close()
        return place, csd.generate(e, PROMPTS[place], **OPTIONS).tokens

    before = threading.active_count()
    with ThreadPoolExecutor(8) as pool:
        for place, tokens in pool.map(call, times(16, 400)):
            assert tokens == expected[place]
    assert threading.active_count() == before
    assert_usable(e, PROMPTS[0], expected[0], **OPTIONS)


def test_engines_in_threads(expected):
    """Each thread has an engine, and all of them one model."""
    model, tokenizer = toy()
    want = [
        csd.generate(csd.Engine(model, tokenizer=tokenizer), p, **OPTIONS).tokens
        for p in PROMPTS[:3]
    ]

    def call(i):
        own = csd.Engine(model, tokenizer=tokenizer, max_slots=1 + i % 3)
        return [csd.generate(own, p, **OPTIONS).tokens for p in PROMPTS[:3]]

    with ThreadPoolExecutor(8) as pool:
        for tokens in pool.map(call, times(2, 32)):
            assert tokens == want


def test_a_stream_that_another_thread_ends(expected):
    """A generator belongs to nobody: it may be read here and closed there."""
    e = fresh()
    events = csd.stream(e, PROMPTS[0], **OPTIONS)
    next(events)
    closer = threading.Thread(target=events.close)
    closer.start()
    closer.join(timeout=60)
    assert not closer.is_alive()
    assert_usable(e, PROMPTS[0], expected[0], **OPTIONS)


def test_asyncio(expected):
    e = fresh()

    async def call(i):
        out = await asyncio.to_thread(csd.generate, e, PROMPTS[i], **OPTIONS)
        return out.tokens

    async def streamed():
        found = {}
        for _, sample in csd.stream(fresh(), PROMPTS[0], **OPTIONS):
            found[sample.index] = sample.tokens
            await asyncio.sleep(0)
        return [found[i] for i in sorted(found)]

    async def cancelled():
        task = asyncio.create_task(call(1))
        await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def everything():
        await cancelled()
        return await asyncio.gather(*map(call, range(4)), streamed())

    *calls, stream = asyncio.run(everything())
    assert calls == expected[:4]
    assert stream == expected[0]
    assert_usable(e, PROMPTS[0], expected[0], **OPTIONS)


def test_fork_after_use(expected):
    """A child uses what its parent has used, and neither disturbs the other."""
    e = fresh()
    csd.generate(e, PROMPTS[1], **OPTIONS)
    children = []
    for i in range(3):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                tokens = csd.generate(e, PROMPTS[i], **OPTIONS).tokens
                os.write(write, pickle.dumps(tokens))
            finally:
                os._exit(0)
        os.close(write)
        children.append((child, read))
    assert csd.generate(e, PROMPTS[3], **OPTIONS).tokens == expected[3]
    for i, (child, read) in enumerate(children):
        with os.fdopen(read, "rb") as file:
            assert pickle.loads(file.read()) == expected[i]
        assert os.waitpid(child, 0)[1] == 0


def test_copies_of_results():
    out = csd.generate(fresh(), PROMPTS[0], drafts=True, **OPTIONS)
    for made in (copy.deepcopy(out), pickle.loads(pickle.dumps(out)), copy.copy(out)):
        assert made == out
        assert (made.texts, made.seed, len(made)) == (out.texts, out.seed, len(out))
        assert made.stats.tokens_per_step == out.stats.tokens_per_step
        assert csd.vote(made) == csd.vote(out)
    assert pickle.loads(pickle.dumps(out[1])) == out[1]
    deep = copy.deepcopy(out)
    deep[0].tokens.append(5)
    assert deep != out


def tiny(seed=0):
    model = build("qwen3", dtype=torch.float64, seed=seed)
    model.generation_config.eos_token_id = None
    return model


IDS = [5, 6, 7, 5, 6, 7, 5]
DRAW = dict(num_samples=2, max_new_tokens=10, seed=0, budget=8, temperature=0.9)


def test_a_model_is_saved_as_it_was(tmp_path):
    model, twin = tiny(), tiny()
    want = csd.generate(model, IDS, **DRAW).tokens
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    again.generation_config.eos_token_id = None
    state, other = again.state_dict(), twin.state_dict()
    assert state.keys() == other.keys()
    assert all(torch.equal(state[name], other[name]) for name in other)
    assert csd.generate(again, IDS, **DRAW).tokens == want
    assert pickle.loads(pickle.dumps(model.state_dict())).keys() == other.keys()
    copied = copy.deepcopy(model)
    assert csd.generate(copied, IDS, **DRAW).tokens == want


def steps(model, count=3):
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.tensor([IDS])
    for _ in range(count):
        optimiser.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimiser.step()


def test_training_goes_on_after_generate():
    """A model trains as one that csd has never seen, and csd samples the trained one."""
    model, twin = tiny(), tiny()
    before = csd.generate(model, IDS, **DRAW).tokens
    for m in (model, twin):
        m.train()
        steps(m)
        m.eval()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12), name
    after = csd.generate(model, IDS, **DRAW).tokens
    assert after == csd.generate(twin, IDS, **DRAW).tokens != before


def test_weights_that_change_between_calls():
    model, other = tiny(), tiny(seed=1)
    first = csd.generate(model, IDS, **DRAW).tokens
    second = csd.generate(other, IDS, **DRAW).tokens
    assert first != second
    changes = [
        lambda: model.load_state_dict(other.state_dict()),
        lambda: [p.data.copy_(q.data) for p, q in both(model, tiny())],
        # new addresses
        lambda: [setattr(p, "data", q.data.clone()) for p, q in both(model, other)],
        lambda: model.load_state_dict(tiny().state_dict(), assign=True),
    ]
    for i, change in enumerate(changes):
        change()
        model.generation_config.eos_token_id = None
        assert csd.generate(model, IDS, **DRAW).tokens == (second, first)[i % 2]
    model.to(torch.float32).to(torch.float64)
    assert len(csd.generate(model, IDS, **DRAW).tokens) == 2


def both(a, b):
    return list(zip(a.parameters(), b.parameters(), strict=True))
