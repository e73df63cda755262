"""Cost of constraints: seconds per token with each of them and without, drafted and plain.

    python -m bench constraints [MODEL] [--samples 8] [--rounds 5] [--before CHECKOUT] --json F

SmolLM2-135M when no model is given. The sides alternate within each round, on one thread, and are
timed in CPU seconds of the process, which other processes on the machine hardly change. "price" is
the ratio of seconds per token to those without constraints, the median over rounds: for plain
steps, where it is the cost of a row, and for steps with drafts (budget "auto"), where the compared
texts differ in length and tau. JSON needs llguidance. With --before, this checkout without
constraints is timed against another one, such as the last before constraints were added, in
alternating processes: "price" is then the cost of constraints for a call that uses none.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch

import csd
from bench.e2e.constraints_worker import PROMPT
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
SIDES = {
    "none": {},
    "table": dict(logit_bias={10: 1.0}, suppress_tokens=[90, 91]),
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
                    [{"role": "user", "content": PROMPT}],
                    num_samples=samples,
                    temperature=0.7,
                    max_new_tokens=tokens,
                    seed=i,
                    **asked,
                    **options,
                )
                spent = (time.process_time() - start) / out.stats.tokens
                # warm-up: the first round allocates, measures and compiles
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


class Checkout:
    """Process that runs the csd of a folder, without constraints."""

    def __init__(self, folder: Path, model: str, samples: int, tokens: int):
        self.folder = folder.resolve()
        self._process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("constraints_worker.py")),
                model,
                str(samples),
                str(tokens),
            ],
            env=os.environ | {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"},
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, seed: int, options: dict) -> float:
        """Returns CPU seconds per token."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([seed, options]), file=self._process.stdin, flush=True)
        spent, file = json.loads(self._process.stdout.readline())
        if not Path(file).is_relative_to(self.folder):
            raise RuntimeError(f"the csd of {self.folder} was to be timed, got {file}")
        return spent

    def close(self) -> None:
        self._process.communicate()


def run_unused(before: str, model: str, samples: int, rounds: int, tokens: int) -> list[dict]:
    """Rows with the ratio of this checkout's times to another one's, without constraints."""
    here = Path(__file__).parents[2]
    sides = [Checkout(Path(folder), model, samples, tokens) for folder in (before, here)]
    prices: dict[str, list[float]] = {how: [] for how in HOW}
    for i in range(rounds + 1):
        for how, options in HOW.items():
            # the two alternate in who runs first
            order = sides if i % 2 else sides[::-1]
            took = {side: side.seconds(i, options) for side in order}
            if i:
                prices[how].append(took[sides[1]] / took[sides[0]])
    for side in sides:
        side.close()
    return [
        {"constraint": "unused"}
        | {f"price, {how}": statistics.median(ratios) for how, ratios in prices.items()}
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--before", help="a checkout to compare with where nothing is asked for")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = args.model or smollm2_path()
    unused = []
    if args.before:
        unused = run_unused(args.before, model, args.samples, args.rounds, args.tokens)
    with csd.Engine(model) as engine:
        rows = unused + run(engine, args.samples, args.rounds, args.tokens)
        dtype = str(engine.dtype)
    print(table(rows))
    result = {"rows": rows, "samples": args.samples, "rounds": args.rounds, "dtype": dtype}
    finish(result | {"tokens": args.tokens}, args.json)


if __name__ == "__main__":
    main()
