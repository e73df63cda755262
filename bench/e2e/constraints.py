"""Cost of a sample's options: CPU seconds per step with each of them and without.

    python -m bench constraints [--rounds 3] [--tokens 24] [--before CHECKOUT] --json F

Steps without drafts of 1 and 8 samples, of SmolLM2-135M (vocabulary 49,152) and of Qwen2.5-0.5B's
shape with random weights (151,936), on one thread. The sides alternate within each round and are
timed in CPU seconds of the process, which other processes on the machine hardly change; a side's
number is its best round. A call's prompt and the preparation of its grammar are included. JSON and
regex need llguidance. With --before, this checkout without options is timed against another one,
in alternating processes, with and without drafts: "unused" has the ratios of seconds per token.
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
from transformers import NoRepeatNGramLogitsProcessor

import csd
from bench.e2e.constraints_worker import PROMPT
from bench.lib.common import finish, table
from bench.lib.shapes import random_model
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
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    if args.before:
        rows = run_unused(args.before, smollm2_path(), 8, args.rounds, args.tokens)
    with csd.Engine(smollm2_path()) as engine:
        rows += run(engine, 49152, args.rounds, args.tokens)
        dtype, tokenizer = str(engine.dtype), engine.tokenizer
    with csd.Engine(random_model("qwen2.5-0.5b", dtype=torch.bfloat16)) as engine:
        rows += run(engine, 151936, args.rounds, args.tokens, tokenizer=tokenizer)
    print(table(rows))
    finish({"rows": rows, "rounds": args.rounds, "dtype": dtype, "tokens": args.tokens}, args.json)


if __name__ == "__main__":
    main()
