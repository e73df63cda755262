"""Prompts for engines, what plain sampling draws of a scripted target, and what must hold after."""

import torch
from helpers.models.scripted import VOCAB
from helpers.oracles.oracle import choose, key_of

# two groups of a tiny checkpoint, the first of which repeats itself
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9, 8, 30, 31, 9, 8]]


def plain(model, prompt, seed, sample, length, end_ids=()):
    """The tokens of one sample, from the script itself."""
    key, tokens = key_of(seed, prompt), []
    for position in range(length):
        logits = model.next_logits(prompt + tokens).numpy()
        tokens.append(choose(logits, key, position, sample, 0)[0])
        if tokens[-1] in end_ids:
            break
    return tokens


def prompts(count, longest=200):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    lengths[:2] = [1, 65]
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


def assert_same_samples(got, want) -> None:
    """Results of the same tokens, which end for the same reasons."""
    for a, b in zip(got, want, strict=True):
        assert a.tokens == b.tokens
        assert a.finish_reasons == b.finish_reasons


def free(service):
    """True if nothing is in flight, and all pages, groups and slots are free again."""
    service.close()
    step = service.engine.caches.step
    assert len(step.cache.allocator) == step.cache.k.shape[1]
    assert not step.slots.live.any() and (step.slots.group_key == -1).all()
    assert service.waiting == 0
    return True
