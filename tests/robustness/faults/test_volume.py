"""Many calls, many samples, many prompts, and the sizes at both ends."""

import gc

import pytest
import torch
from faults import MANY, times
from helpers.models.checkpoints import VOCAB, build
from helpers.models.scripted import LastToken, PrefixSum, counting, engine
from helpers.oracles import oracle
from helpers.runs.engine_cases import plain
from helpers.runs.fuzzing import open_files

import csd


def resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


def test_memory_and_files_stay_flat():
    e = engine(PrefixSum(sharpness=8.0), max_slots=4)
    sizes = []
    calls = times(40, 1000)
    for i in calls:
        # prompts of several lengths, and every fourth call is left half way
        events = csd.stream(e, [1 + i % 7] * (1 + i % 50), num_samples=3, max_new_tokens=6, seed=i)
        for _ in events:
            if i % 4 == 0:
                events.close()
                break
        if i in (len(calls) // 4, len(calls) - 1):
            gc.collect()
            sizes.append((open_files(), resident(), len(gc.get_objects())))
    (files, memory, objects), (files_now, memory_now, objects_now) = sizes
    assert files_now == files
    assert objects_now < objects * 1.05 + 500
    # what an allocator keeps in pieces
    assert memory_now - memory < 32 << 20


def test_many_samples():
    count = 10_000 if MANY else 300
    model = counting(6)
    out = csd.generate(engine(model), [0], num_samples=count, max_new_tokens=4, budget=8, seed=0)
    assert out.tokens == [[1, 2, 3, 4]] * count
    assert [s.index for s in out] == [*range(count)]


def test_many_prompts():
    count = 1000 if MANY else 40
    model = PrefixSum(sharpness=8.0)
    prompts = [[i % 32, i // 32, 5] for i in range(count)]
    e = engine(model, max_slots=16)
    out = csd.generate(e, prompts, num_samples=2, max_new_tokens=4, budget=8, seed=0)
    assert len(out) == count
    for i in range(0, count, max(count // 20, 1)):
        for sample in out[i]:
            assert sample.tokens == plain(model, prompts[i], 0, sample.index, 4)


@pytest.mark.parametrize("room", [1, 2, 63, 64])
def test_a_prompt_at_the_contexts_edge(room):
    model = PrefixSum(sharpness=8.0, context=256)
    e = engine(model, max_slots=2, prefill_chunk=100)
    prompt = [i % 32 for i in range(256 - room)]
    out = csd.generate(e, prompt, num_samples=2, seed=1, budget=8)
    for sample in out:
        assert sample.tokens == plain(model, prompt, 1, sample.index, room)
    with pytest.raises(ValueError, match="exceed the model's context of 256"):
        csd.generate(e, prompt, max_new_tokens=room + 1)
    with pytest.raises(ValueError, match="leaves no room in the model's context of 256"):
        csd.generate(e, [1] * 256)


@pytest.mark.parametrize("vocab", [2, 3, 31, 33, 1000, 300_000])
def test_vocabularies(vocab):
    """Every token's noise, filters and drafts, whatever the vocabulary."""

    def logits_of(token, position):
        # a few likely tokens, the last of the vocabulary among them, and a long tail
        logits = torch.zeros(token.shape[0], vocab, dtype=torch.float64)
        rows = torch.arange(token.shape[0])
        logits[rows, (token * 7 + position) % vocab] = 12.0
        logits[rows, vocab - 1] = 11.5
        return logits

    model = LastToken(logits_of, vocab)
    e = engine(model, max_slots=4)
    length = 8 if vocab <= 1000 or MANY else 3
    options = dict(num_samples=3, max_new_tokens=length, seed=2)
    out = csd.generate(e, [0, 1], budget=8, **options)
    key = oracle.key_of(2, [0, 1])
    for sample in out:
        last, tokens = 1, []
        for i in range(length):
            logits = logits_of(torch.tensor([last]), torch.tensor([1 + i]))[0].numpy()
            last = oracle.choose(logits, key, i, sample.index, 0)[0]
            tokens.append(last)
        assert sample.tokens == tokens
    if vocab > 1000 and not MANY:
        return
    filtered = dict(top_k=2, top_p=0.9, min_p=0.01, repetition_penalty=1.1)
    same = [csd.generate(e, [0, 1], budget=b, **filtered, **options).tokens for b in (0, 8)]
    assert same[0] == same[1]


def test_one_kv_head():
    sizes = dict(num_attention_heads=3, num_key_value_heads=1)
    model, twin = (build("qwen3", dtype=torch.float64, **sizes) for _ in range(2))
    for m in (model, twin):
        m.generation_config.eos_token_id = None
    options = dict(seed=0, temperature=0.8)
    out = csd.generate(twin, [5, 6, 5, 6], num_samples=3, max_new_tokens=8, budget=8, **options)
    for sample in out:
        tokens = oracle.generate(
            model, [5, 6, 5, 6], sample=sample.index, max_new_tokens=8, **options
        )[0]
        assert sample.tokens == tokens
        assert max(tokens) < VOCAB
