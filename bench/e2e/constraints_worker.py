"""Time a checkout's csd without constraints: `python constraints_worker.py MODEL SAMPLES TOKENS`.

PYTHONPATH selects the checkout. Reads lines of JSON, [seed, options], and writes CPU seconds per
token for each.
"""

import json
import os
import sys
import time

PROMPT = "Describe a novel as JSON, with title, author, year, genres and a review of it."


def main(model: str, samples: str, tokens: str) -> None:
    # answers get a copy of standard output; other prints go to standard error
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    import csd

    torch.set_num_threads(1)
    with csd.Engine(model) as engine:
        for line in sys.stdin:
            seed, options = json.loads(line)
            start = time.process_time()
            out = engine.generate(
                [{"role": "user", "content": PROMPT}],
                num_samples=int(samples),
                seed=seed,
                temperature=0.7,
                max_new_tokens=int(tokens),
                **options,
            )
            spent = time.process_time() - start
            print(json.dumps([spent / out.stats.tokens, csd.__file__]), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
