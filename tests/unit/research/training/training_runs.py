"""Recorded samples to train a head on, the files of a run, and what a head's drafts are worth."""

from functools import cache

import csd

PROMPTS = [[5, 17, 3], [60, 9, 9, 31, 4], [8, 2]]
SAMPLING = dict(num_samples=2, max_new_tokens=20, temperature=0.8, seed=3)


def recorded(model, path, **options):
    """Samples of `PROMPTS`, by `csd.generate`."""
    with csd.Engine(model, kernels="reference") as engine:
        engine.generate(PROMPTS, record=str(path), ignore_eos=True, **SAMPLING | options)
    return path


def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@cache
def plain_tokens(model, options):
    with csd.Engine(model, kernels="reference") as e:
        return [r.tokens for r in e.generate(PROMPTS, speculate=False, **dict(options))]


def tau_of(model, folder, **options):
    """Tokens of a step with chains of three from a head, whose samples are plain sampling's."""
    options = SAMPLING | options | dict(ignore_eos=True)
    with csd.Engine(model, kernels="reference") as e:
        drafter = csd.Eagle(folder, k=1, depth=3)
        out = e.generate(PROMPTS, drafter=drafter, budget=32, **options)
    assert [r.tokens for r in out] == plain_tokens(model, tuple(options.items()))
    return sum(r.stats.tokens for r in out) / sum(r.stats.sample_steps for r in out)
