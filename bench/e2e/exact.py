"""Cost and effect of `exact=True`: the same runs with and without it, drafted and plain.

    python -m bench exact [MODEL] [--dtypes bfloat16 float32] [--samples 4 8] --json F

SmolLM2-135M when no model is given, word problems at temperature 0.7 without filters. The sides
alternate within each round, on one thread, and are timed in CPU seconds of the process, which other
processes on the machine hardly change. "price" is the time with exact=True over that without, the
median over rounds, for plain steps and for steps with drafts. For the samples drawn with
`budget="auto"`, a row also has the share that differs from plain sampling by the same engine, and
the number of tokens before the earliest difference.
"""

import argparse
import statistics
import time

import torch

import csd
from bench.e2e.cpu import PROBLEMS
from bench.lib.common import finish, table
from bench.lib.models import path_of
from bench.lib.settings import PLAIN

# drafted tokens per step, over all samples
NODES = 24


def seconds(engine: csd.Engine, prompt: str, **options) -> tuple[float, csd.Samples]:
    start = time.process_time()
    out = engine.generate([{"role": "user", "content": prompt}], **PLAIN, **options)
    return time.process_time() - start, out


def differing(out: csd.Samples, plain: csd.Samples) -> list[int]:
    """For each sample that differs, the number of equal tokens before its first difference."""
    first_differences = []
    for a, b in zip(out.tokens, plain.tokens, strict=True):
        if a != b:
            same = [x == y for x, y in zip(a, b, strict=False)]
            first_differences.append(same.index(False) if False in same else min(len(a), len(b)))
    return first_differences


def row(engines: dict[bool, csd.Engine], samples: int, rounds: int, tokens: int) -> dict:
    took: dict[tuple[bool, str], list[float]] = {}
    parted: dict[bool, list[int]] = {True: [], False: []}
    for i in range(rounds + 1):
        prompt = PROBLEMS[i % len(PROBLEMS)]
        options = dict(num_samples=samples, max_new_tokens=tokens, seed=i)
        for exact, engine in engines.items():
            sides = {
                "plain": dict(speculate=False),
                "drafted": dict(budget=NODES),
                "auto": dict(budget="auto"),
            }
            outs = {}
            for name, how in sides.items():
                spent, outs[name] = seconds(engine, prompt, **options, **how)
                # warm-up: the first round allocates, measures and compiles
                if i:
                    took.setdefault((exact, name), []).append(spent)
            parted[exact] += differing(outs["auto"], outs["plain"])
    drawn = samples * (rounds + 1)
    figures: dict = {"samples": samples}
    for name in ("plain", "drafted"):
        pairs = zip(took[True, name], took[False, name], strict=True)
        figures[f"price, {name}"] = statistics.median(a / b for a, b in pairs)
    for exact, name in ((True, "exact"), (False, "not exact")):
        figures[f"{name}: differ"] = f"{len(parted[exact])} of {drawn}"
        figures[f"{name}: after"] = min(parted[exact], default=None)
    return figures


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="as of csd.generate")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    for name in args.dtypes:
        options = dict(dtype=getattr(torch, name), device="cpu")
        model = path_of(args.model)
        engines = {exact: csd.Engine(model, exact=exact, **options) for exact in (True, False)}
        for samples in args.samples:
            rows.append({"dtype": name} | row(engines, samples, args.rounds, args.tokens))
            print(table(rows[-1:]), flush=True)
    print(table(rows))
    finish({"bench": "exact", "nodes": NODES, "tokens": args.tokens, "rows": rows}, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
