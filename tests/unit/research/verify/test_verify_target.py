"""Schemes verify against the distribution that the default verifier samples from."""

import pytest
import torch
from helpers.runs.sampled_cases import grow, state

from csd.kernels.ops import reference
from csd.research.verify.multi_draft import processed
from csd.state.pool_builder import roots

FILTERS = [
    dict(),
    dict(temperature=0.7),
    dict(temperature=0.4, top_k=5),
    dict(temperature=1.0, top_p=0.9),
    dict(temperature=2.0, top_p=0.3, top_k=11),
    dict(temperature=1.5, min_p=0.2),
    dict(temperature=1.3, typical_p=0.7),
    dict(temperature=2.0, top_k=30, top_p=0.95, min_p=0.01, typical_p=0.4),
    dict(temperature=0.8, top_p=0.999999999, repetition_penalty=1.3),
    dict(temperature=1.0, top_p=0.6, min_p=0.1, repetition_penalty=0.7),
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_processed_equals_the_distribution_of_verify(options):
    """Its eight likeliest tokens and the log-probability of what it sampled, at every row."""
    vocab = 70
    generator = torch.Generator().manual_seed(4)
    slots = state()
    slots.seen = torch.randint(-(2**31), 2**31 - 1, (4, 3), generator=generator, dtype=torch.int32)
    for name, value in options.items():
        getattr(slots, name)[:2] = value
    slots.min_new.fill_(2)
    slots.ban_ids[:, 0], slots.ban_ids[:, 1] = 5, 6
    pool, _ = grow(slots, 30)
    logits = torch.randn(pool.rows, vocab, generator=generator, dtype=torch.float64) * 5
    # equal values on both sides of a cut, and tokens far below
    logits[:, 20:30] = logits[:, 20:21]
    logits[:, 40] = -torch.inf
    logits[:, 41:] -= 15
    rows = (pool.slot >= 0).nonzero()[:, 0]
    probs = processed(logits, rows, pool, slots)
    verdict = reference().verify_all(logits, pool, slots)
    assert (probs.sum(-1) - 1).abs().max() < 1e-12
    top = verdict.top_token[rows].long()
    shown = torch.where(top >= 0, probs.gather(1, top.clamp(min=0)), 0)
    assert (shown - verdict.top_prob[rows]).abs().max() < 1e-6
    beyond = probs.scatter(1, top.clamp(min=0), 0).amax(-1)
    # where the head has fewer than eight, all others are below exp(-11.1)
    assert (beyond <= verdict.top_prob[rows][:, -1] + 1.6e-5).all()
    chosen = probs.gather(1, verdict.sample[rows].long()[:, None])[:, 0]
    assert (chosen.log() - verdict.logprob[rows]).abs().max() < 1e-9
    early = (slots.generated[pool.slot[rows].long()] + pool.depth[rows]) < 2
    assert (probs[early][:, 5:7] == 0).all() and early.any()


def test_processed_excludes_the_tokens_that_verify_excludes():
    """The whole support, by drawing from it often."""
    slots = state(live=1, temperature=1.0, top_p=0.8)
    pool = roots(slots, 1)
    logits = torch.linspace(0, 3, 8, dtype=torch.float64)[None]
    logits[0, 2:5] = logits[0, 3]
    probs = processed(logits, torch.tensor([0]), pool, slots)[0]
    drawn = set()
    for i in range(300):
        slots.sample.fill_(i)
        drawn.add(int(reference().verify_all(logits, pool, slots).sample[0]))
    assert drawn == set(probs.nonzero()[:, 0].tolist())
    assert len(drawn) < 8
