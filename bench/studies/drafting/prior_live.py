"""Seconds of a batch of problems with a prior of other problems' answers, and without.

    python -m bench prior_live PROBLEMS --learn TRACES [--skip 20] [--problems 40] [--samples 1 4 8]
        [--tokens 64] [--slots 64] [--pairs 7] [--json F]

SmolLM2-135M at temperature 0.7; PROBLEMS has a "question" in each line, TRACES are recorded answers
to others. Both arms draft with the automatic budget, in turn; their tokens are compared. Times are
seconds, and processor seconds, which other programs change less. The prior of the third arm,
"zero", has no text: the model's likeliest tokens behind each single token (`csd warmup --prior`).
An existing file keeps its rows of other numbers of samples or slots.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median

import csd
from bench.lib.common import bootstrap, finish, merged, table, write
from csd.models.demo import smollm2_path
from csd.traces.traces import read_traces


def row(samples: int, slots: int, arms: dict, pairs: list[dict]) -> dict:
    figures: dict = {"samples": samples, "slots": slots, "pairs": len(pairs)}
    for arm in arms:
        figures |= {f"tau, {arm}": pairs[0][arm]["tau"], f"nodes, {arm}": pairs[0][arm]["nodes"]}
        if arm != "none":
            for clock in ("seconds", "processor"):
                ratios = [p["none"][clock] / p[arm][clock] for p in pairs]
                figures[f"{clock}, {arm}"] = median(ratios)
                figures[f"{clock}, {arm}, interval"] = bootstrap(ratios)
    return figures


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems_file", metavar="PROBLEMS")
    parser.add_argument("--learn", nargs="+", required=True, metavar="TRACES")
    parser.add_argument("--zero", metavar="FILE", help="prior without text, for a third arm")
    parser.add_argument("--skip", type=int, default=20)
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    lines = Path(args.problems_file).read_text().splitlines()
    questions = [json.loads(x)["question"] for x in lines][args.skip : args.skip + args.problems]
    prompts = [[{"role": "user", "content": question}] for question in questions]
    engine = csd.Engine(smollm2_path(), max_slots=args.slots)
    prior = csd.Prior()
    for trace in (t for path in args.learn for t in read_traces(path)):
        prior.add(trace.prompt, trace.samples, trace.top)
    arms = {"none": None, "prior": prior}
    if args.zero:
        arms["zero"] = csd.Prior.load(args.zero)
    settings = vars(args) | {"learn": [Path(x).name for x in args.learn], "zero": bool(args.zero)}
    settings |= {"problems_file": Path(args.problems_file).name, "json": None}
    result: dict = {"bench": "prior_live", "options": settings, "dtype": str(engine.dtype)}
    result |= {"learnt_tokens": prior.tokens, "rows": [], "pairs": {}}
    if args.json and Path(args.json).exists():
        before = json.loads(Path(args.json).read_text())
        result |= {name: before[name] for name in ("rows", "pairs")}
    for samples in args.samples:
        options = dict(
            num_samples=samples,
            max_new_tokens=args.tokens,
            temperature=0.7,
            top_p=1.0,
            top_k=0,
            progress=False,
        )
        pairs: list[dict] = []
        for i in range(args.pairs + 1):
            drawn, pair = [], {}
            # the first arm changes, and the first round only warms up
            for arm in [*arms][:: (-1) ** i]:
                # an engine of a kind keeps its caches: allocate before the time begins
                engine.generate(prompts, seed=0, prior=arms[arm], **options | {"max_new_tokens": 1})
                start, spent = time.perf_counter(), time.process_time()
                out = engine.generate(prompts, seed=i, prior=arms[arm], **options)
                seconds, spent = time.perf_counter() - start, time.process_time() - spent
                stats = [o.stats for o in out]
                steps = sum(s.sample_steps for s in stats)
                pair[arm] = {
                    "seconds": seconds,
                    "processor": spent,
                    "tau": sum(s.tokens for s in stats) / steps,
                    "nodes": sum(s.nodes_proposed for s in stats) / steps,
                }
                drawn.append([o.tokens for o in out])
            pair["equal"] = all(x == drawn[0] for x in drawn)
            if i:
                pairs.append(pair)
                result["pairs"][f"{samples} samples, {args.slots} slots"] = pairs
                new = row(samples, args.slots, arms, pairs)
                result["rows"] = merged(result["rows"], [new], ("samples", "slots"))
                write(result, args.json)
        print(table([result["rows"][-1]]), flush=True)
    finish(result, args.json)


if __name__ == "__main__":
    main()
