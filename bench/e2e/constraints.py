"""Cost of a sample's options: CPU seconds per step with each of them and without.

    python -m bench constraints [--flat] [--rounds 3] [--tokens 24] [--before CHECKOUT] --json F

Steps without drafts of 1 and 8 samples, of SmolLM2-135M (vocabulary 49,152) and of Qwen2.5-0.5B's
shape with random weights (151,936), on one thread. The sides alternate within each round and are
timed in CPU seconds of the process, which other processes on the machine hardly change; a side's
number is its best round. A call's prompt and the preparation of its grammar are included. JSON and
regex need llguidance. With --before, this checkout without options is timed against another one,
in alternating processes, with and without drafts: "unused" has the ratios of seconds per token.

With --flat, the CPU milliseconds of a step's verification alone, of 8 samples with each filter at
temperatures of 1, 1.5 and 2: at 1.5 most tokens remain in a row's head.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import NoRepeatNGramLogitsProcessor

import csd
from bench.e2e.constraints_worker import PROMPT
from bench.lib.common import finish, table
from bench.lib.shapes import random_model
from csd.engine.step.step import Step
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
GRAMMARS = {"json", "regex"}
SIDES: dict[str, dict] = {
    "none": {},
    "filters": dict(top_k=20, top_p=0.8, repetition_penalty=1.05),
    "typical": dict(typical_p=0.9),
    "bias": dict(logit_bias={10: 1.0}, suppress_tokens=[90, 91]),
    "allowed": dict(allowed_token_ids=list(range(100, 5000))),
    "bias and filters": dict(logit_bias={10: 1.0}, top_k=20, top_p=0.8, repetition_penalty=1.05),
    "words": dict(bad_words=["lighthouse keeper", "by the way"]),
    "ngram": dict(no_repeat_ngram_size=6),
    "counts": dict(frequency_penalty=0.1, presence_penalty=0.1),
    "min tokens": dict(min_new_tokens=True),
    "stop": dict(stop=["lighthouse keeper", "by the way"]),
    "top_logprobs": dict(top_logprobs=20),
    "thought": dict(max_thinking_tokens=100, thinking_tags=("<think>", "</think>")),
    "processor": dict(logits_processor=[NoRepeatNGramLogitsProcessor(6)]),
    "function": dict(logits_processor=lambda ids, logits: logits),
    "regex": dict(regex="[a-z ]{400,500}"),
    "json": dict(json_schema=SCHEMA),
}
# sides whose samples may end before the others'
ENDING = {"json", "regex", "min tokens"}
# filters whose verification is timed by itself
FLAT: dict[str, dict] = {
    "none": {},
    "top_k": dict(top_k=50),
    "top_p": dict(top_p=0.95),
    "min_p": dict(min_p=0.05),
    "typical": dict(typical_p=0.9),
    "penalty": dict(repetition_penalty=1.1),
    "counts": dict(frequency_penalty=0.3),
}
TEMPERATURES = (1.0, 1.5, 2.0)
HOW = {"plain": dict(speculate=False), "auto": dict(budget="auto")}
SAMPLES = (1, 8)


def run(engine: csd.Engine, vocab: int, rounds: int, tokens: int, **options) -> list[dict]:
    """Rows of an engine: milliseconds per step of each side, by number of samples."""
    sides = {k: v for k, v in SIDES.items() if k not in GRAMMARS or find_spec("llguidance")}
    best: dict[tuple[str, int], float] = {}
    for i in range(rounds + 1):
        for side, asked in sides.items():
            if side == "min tokens":
                asked = dict(min_new_tokens=tokens)
            for samples in SAMPLES:
                start = time.process_time()
                out = csd.generate(
                    engine,
                    PROMPT,
                    num_samples=samples,
                    temperature=0.7,
                    max_new_tokens=tokens,
                    seed=i,
                    speculate=False,
                    ignore_eos=side not in ENDING,
                    **options,
                    **asked,
                )
                spent = 1000 * (time.process_time() - start) / out.stats.steps
                # warm-up: the first round allocates, measures and compiles
                if i:
                    best[side, samples] = min(best.get((side, samples), spent), spent)
    return [
        {"option": side, "vocabulary": vocab}
        | {f"ms, {n}": best[side, n] for n in SAMPLES}
        | {f"share, {n}": best[side, n] / best["none", n] - 1 for n in SAMPLES}
        for side in sides
    ]


@contextmanager
def timed_verification() -> Iterator[list[float]]:
    """Context whose value gets the CPU seconds of each step's verification."""
    spent: list[float] = []
    verify = Step.verify

    def timed(step: Step, *args: Any) -> Any:
        start = time.process_time()
        result = verify(step, *args)
        spent.append(time.process_time() - start)
        return result

    with mock.patch.object(Step, "verify", timed):
        yield spent


def run_flat(
    engine: csd.Engine, vocab: int, rounds: int, tokens: int, **options: Any
) -> list[dict]:
    """Rows of an engine: milliseconds of a step's verification by filter and temperature."""
    rows = []
    for (option, asked), temperature in product(FLAT.items(), TEMPERATURES):
        best = math.inf
        for i in range(rounds + 1):
            with timed_verification() as spent:
                how = dict(num_samples=8, temperature=temperature, max_new_tokens=tokens, seed=i)
                how |= dict(speculate=False, ignore_eos=True)
                csd.generate(engine, PROMPT, **how, **options, **asked)
            if i:
                best = min(best, 1000 * statistics.median(spent))
        rows.append({"option": option, "vocabulary": vocab, "temperature": temperature, "ms": best})
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
        {"option": "unused"}
        | {f"price, {how}": statistics.median(ratios) for how, ratios in prices.items()}
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--before", help="a checkout to compare with where nothing is asked for")
    parser.add_argument("--flat", action="store_true", help="verification at high temperatures")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, how = [], (args.rounds, args.tokens)
    if args.before:
        rows = run_unused(args.before, smollm2_path(), 8, *how)
    measured = run_flat if args.flat else run
    with csd.Engine(smollm2_path()) as engine:
        rows += measured(engine, 49152, *how)
        dtype, tokenizer = str(engine.dtype), engine.tokenizer
    with csd.Engine(random_model("qwen2.5-0.5b", dtype=torch.bfloat16)) as engine:
        rows += measured(engine, 151936, *how, tokenizer=tokenizer)
    print(table(rows))
    finish({"rows": rows, "rounds": args.rounds, "dtype": dtype, "tokens": args.tokens}, args.json)


if __name__ == "__main__":
    main()
