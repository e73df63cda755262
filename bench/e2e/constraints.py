"""What constraints cost: seconds a token with each of them, and without, drafted and plain.

    python -m bench constraints [MODEL] [--samples 8] [--rounds 5] --json F

SmolLM2-135M when no model is given. The sides take turns within each round, on one thread, and are
timed in CPU seconds of the process, which another process on the machine hardly changes. "price" is
seconds a token over those without constraints, the median over rounds: of plain steps, where it is
the price of a row, and of steps with drafts (budget "auto"), where texts of other lengths and other
tau are compared. JSON needs llguidance.
"""

import argparse
import statistics
import time
from importlib.util import find_spec

import torch

import csd
from bench.lib.common import finish, table
from csd.models.demo import smollm2_path

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "author": {"type": "string"},
        "year": {"type": "integer"},
        "genres": {"type": "array", "items": {"type": "string"}, "minItems": 2},
        "review": {"type": "string"},
    },
    "required": ["title", "author", "year", "genres", "review"],
    "additionalProperties": False,
}
PROMPT = "Describe a novel as JSON, with title, author, year, genres and a review of it."
SIDES = {
    "none": {},
    "table": dict(logit_bias={10: 1.0}, suppress_tokens=[1000, 2000]),
    "ngram": dict(no_repeat_ngram_size=6),
    "counts": dict(frequency_penalty=0.1, presence_penalty=0.1),
    "function": dict(logits_processor=lambda ids, logits: logits),
    "json": dict(json_schema=SCHEMA),
}
HOW = {"plain": dict(speculate=False), "auto": dict(budget="auto")}


def run(engine: csd.Engine, samples: int, rounds: int, tokens: int) -> list[dict]:
    took: dict[tuple[str, str], list[float]] = {}
    tau: dict[tuple[str, str], list[float]] = {}
    sides = {k: v for k, v in SIDES.items() if k != "json" or find_spec("llguidance")}
    for i in range(rounds + 1):
        for side, asked in sides.items():
            for how, options in HOW.items():
                start = time.process_time()
                out = engine.generate(
                    [{"role": "user", "content": PROMPT}], num_samples=samples, temperature=0.7,
                    max_new_tokens=tokens, seed=i, **asked, **options,
                )  # fmt: skip
                spent = (time.process_time() - start) / out.stats.tokens
                # the first round allocates, measures and compiles
                if i:
                    took.setdefault((side, how), []).append(spent)
                    tau.setdefault((side, how), []).append(out.stats.tokens_per_step)
    rows = []
    for side in sides:
        row: dict = {"constraint": side}
        for how in HOW:
            pairs = zip(took[side, how], took["none", how], strict=True)
            row[f"price, {how}"] = statistics.median(a / b for a, b in pairs)
        row["ms a token, auto"] = 1000 * statistics.median(took[side, "auto"])
        row["tau"] = statistics.median(tau[side, "auto"])
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with csd.Engine(args.model or smollm2_path()) as engine:
        rows = run(engine, args.samples, args.rounds, args.tokens)
        dtype = str(engine.dtype)
    print(table(rows))
    result = {"rows": rows, "samples": args.samples, "rounds": args.rounds, "dtype": dtype}
    finish(result | {"tokens": args.tokens}, args.json)


if __name__ == "__main__":
    main()
