"""One answer from many samples: a vote that stops as soon as it is decided, and the best sample.

`until=csd.Vote()` cancels the rest once they cannot change a plain majority, so its answer is that
of all samples, for fewer tokens. `csd.Vote(confidence=0.95)` stops earlier and may differ from it.
"""

import argparse
from typing import Any

import csd
from csd.models.demo import smollm2_path

PROBLEM = (
    "A baker makes 6 trays of rolls with 12 rolls on each tray. She sells 48 rolls. "
    "How many rolls are left? Work it out step by step."
)


def main(
    model: Any,
    tokenizer: Any = None,
    samples: int = 16,
    tokens: int = 160,
    problem: str = PROBLEM,
) -> dict[str, csd.Samples]:
    options = dict(tokenizer=tokenizer, num_samples=samples, max_new_tokens=tokens, seed=0)
    options |= dict(temperature=0.7, budget=16)
    prompt = [{"role": "user", "content": problem}]

    drawn = {}
    for name, until in [
        ("all samples", None),
        ("until decided", csd.Vote()),
        ("until 95% sure", csd.Vote(confidence=0.95)),
    ]:
        out = drawn[name] = csd.generate(model, prompt, until=until, **options)
        decision = csd.vote(out)
        print(f"{name:>14}: {decision}\n{'':16}{out.stats}")

    # or a reward model: csd.best_of(out, model, tokenizer=tokenizer, prompt=prompt)
    best = csd.best_of(drawn["all samples"])
    print(f"\nthe likeliest a token, {best.score:.2f}, is sample {best.sample.index}:")
    print((best.sample.text or "").strip())
    return drawn


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder, hub name or GGUF file; SmolLM2-135M if left out")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=160)
    args = parser.parse_args()
    main(args.model or smollm2_path(), samples=args.samples, tokens=args.tokens)
