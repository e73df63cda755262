"""Prompts and draws of the tests of layers with a state."""

TOKENS = 24


def prompt(length):
    return [(7 * i + 3) % 61 for i in range(length)]


def drawn(engine, given, budget, samples=4, tokens=TOKENS, **params):
    return engine.generate(
        given,
        num_samples=samples,
        seed=4,
        max_new_tokens=tokens,
        budget=budget,
        temperature=0.7,
        end_token_ids=[],
        **params,
    )
