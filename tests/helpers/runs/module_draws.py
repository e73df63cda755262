"""Draws of an engine, and plain sampling's from the module's own forward."""

from helpers.oracles import oracle

PROMPT = [(7 * i + 3) % 61 for i in range(20)]
TOKENS = 8


def plain(model, **params):
    return [
        oracle.generate(model, PROMPT, seed=4, sample=i, max_new_tokens=TOKENS, **params)
        for i in range(2)
    ]


def drawn(engine, budget, **params):
    return engine.generate(
        PROMPT,
        num_samples=2,
        seed=4,
        max_new_tokens=TOKENS,
        budget=budget,
        end_token_ids=[],
        **params,
    )
