"""Time of a second call with another seed, with the first call's samples as history or without.

    python -m bench history_live [--prompts 4] [--samples 4] [--tokens 64] [--pairs 5] [--json F]

SmolLM2-135M in float32 at temperature 0.7, on word problems. The second calls alternate; their
tokens are compared.
"""

import argparse
import time
from statistics import median

import torch

import csd
from bench.lib.common import finish, table
from csd.models.demo import smollm2_path

PROBLEMS = (
    "A baker makes 6 trays of rolls with 12 rolls on each tray. She sells 48 rolls. How many are "
    "left? Work it out step by step.",
    "Tom has 3 boxes of 24 pencils and gives 15 pencils away. How many has he now? Work it out.",
    "A train travels 60 miles an hour for 3 hours and 40 miles an hour for 2. How far is that?",
    "Name the planets of the solar system in order and say one thing about each.",
)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=len(PROBLEMS))
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--budget", type=int, default=32, help="drafted tokens a step")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    engine = csd.Engine(smollm2_path(), dtype=torch.float32)
    prompts = [[{"role": "user", "content": p}] for p in PROBLEMS[: args.prompts]]
    options = dict(
        num_samples=args.samples,
        max_new_tokens=args.tokens,
        temperature=0.7,
        top_p=1.0,
        top_k=0,
        budget=args.budget,
    )
    first = engine.generate(prompts, seed=0, **options)
    # allocates the graph for history before the timed calls
    engine.generate(prompts[:1], seed=2, history=first[:1], **options | {"max_new_tokens": 2})
    arms: dict[str, list] = {"without": [], "history": []}
    drawn = {}
    for _ in range(args.pairs):
        for arm in arms:
            history = first if arm == "history" else None
            start = time.perf_counter()
            out = engine.generate(prompts, seed=1, history=history, **options)
            seconds = time.perf_counter() - start
            tokens, steps = (
                sum(getattr(o.stats, k) for o in out) for k in ("tokens", "sample_steps")
            )
            arms[arm].append((seconds, tokens / steps))
            drawn[arm] = [o.tokens for o in out]
    ratios = [w[0] / h[0] for w, h in zip(arms["without"], arms["history"], strict=True)]
    rows = [
        {"arm": arm, "tau": runs[0][1], "seconds": median(s for s, _ in runs)}
        for arm, runs in arms.items()
    ]
    pairs = list(zip(*([s for p in drawn[a] for s in p] for a in arms), strict=True))
    result = {
        "bench": "history_live",
        "options": vars(args),
        "rows": rows,
        "speed_up": median(ratios),
        "speed_ups": ratios,
        "equal_samples": sum(a == b for a, b in pairs) / len(pairs),
    }
    print(table(rows))
    finish(result, args.json)


if __name__ == "__main__":
    main()
