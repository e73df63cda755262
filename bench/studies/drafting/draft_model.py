"""Drafts of a model compared to the consensus graph's, and sequences under every verifier.

    python -m bench draft_model [pool] [sequences] [--drafts first-20 rounded ...] [--json FILE]

SmolLM2-135M-Instruct answers word problems, or another `--task`'s prompts, in float32. The draft
models are its own first layers (first-N: N of its 30, followed by its last norm and head, without
training), a copy in bfloat16, and copies whose matrices are rounded, with one scale per row: to 8
bits (int8) or 4 (rounded). Rounded weights are stored and multiplied in float32, so such a copy has
the drafts of an integer model but not its speed.

pool       tau, tokens committed per sample and step, with `--nodes` drafted tokens per sample: the
           graph alone, the model alone, both in one pool. Samples are the same for all of them.
sequences  block efficiency, which is tau, and tokens per second of K sequences of 5 tokens under
           the verifiers that draw, at temperature 1.0 and top-p 0.95: Khisti et al.'s Table 1; also
           with drafts at another temperature, all at 1.2 or the first of two. The rate without the
           time of drafting, relative to that of one draft, is shown too, since on a CPU a draft
           model of the target's size takes as long as the target.

New rows replace the same rows of an existing FILE. `--table FILE` prints its tables instead.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

import bench
import csd
from bench.lib.common import finish, machine, merged, write
from bench.studies.drafting.draft_model_tables import WORDS, tables
from bench.studies.verification.verify import chats
from bench.studies.verification.verify_figures import read_model, round_matrices
from bench.studies.verification.verify_tables import tau
from csd.models.demo import smollm2_path

PARTS = ("pool", "sequences")
PROMPTS = Path(bench.__file__).parent / "prompts"
TASKS = ("code", "writing", "commonsense", "medical")
LENGTH = 5
# verifier -> numbers of sequences
RUNS = [("single", 1), *((v, k) for k in (2, 4) for v in ("canonical", "kseq", "recursive"))]
HOT = 1.2
# bits of the copies with rounded matrices
BITS = {"int8": 8, "rounded": 4}


def prompts_of(args) -> list:
    if args.task == WORDS:
        return chats(args.prompts)
    lines = (PROMPTS / f"{args.task}.jsonl").read_text().splitlines()[: args.prompts]
    return [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]


def draft_of(name: str, engine, **options) -> csd.DraftModel:
    """Make the draft model of a name: first-N, bfloat16, int8 or rounded."""
    if name.startswith("first-"):
        return csd.DraftModel(engine.decoder, layers=int(name[6:]), **options)
    return csd.DraftModel(copy_of(name), **options)


@cache
def copy_of(name: str) -> torch.nn.Module:
    model = read_model()
    if name == "bfloat16":
        return model.bfloat16()
    round_matrices(model, BITS[name])
    return model


def drawn(engine, prompts: list, args, **options) -> dict:
    """Draw `prompts`; returns tokens and steps by problem, and the call's seconds by phase."""
    start = time.perf_counter()
    out = csd.generate(
        engine, prompts, num_samples=args.samples, max_new_tokens=args.tokens, seed=1, **options
    )
    seconds = time.perf_counter() - start
    phases = max((o.stats.seconds for o in out), key=lambda s: sum(s.values()))
    return {
        "tokens": [o.stats.tokens for o in out],
        "steps": [o.stats.sample_steps for o in out],
        "nodes": sum(o.stats.nodes_proposed for o in out),
        "accepted": sum(o.stats.nodes_accepted for o in out),
        "seconds": seconds,
        "draft_seconds": phases["propose"] + phases["insert"],
        "load": os.getloadavg()[0],
    }


def pool(engine, args) -> Iterator[dict]:
    prompts = prompts_of(args)
    budget = args.nodes * len(prompts) * args.samples
    options = dict(budget=budget, temperature=0.7)
    kinds: list[tuple] = [("consensus", None)]
    for name in args.drafts:
        kinds += [(name, dict(graph=False)), (f"consensus+{name}", dict(graph=True))]
    for kind, changes in kinds:
        drafter = None
        if changes is not None:
            drafter = draft_of(kind.split("+")[-1], engine, k=args.k, depth=LENGTH, **changes)
        totals = drawn(engine, prompts, args, drafter=drafter, **options)
        yield {"task": args.task, "drafter": kind, "nodes a sample": args.nodes} | totals


def sequences(engine, args) -> Iterator[dict]:
    prompts = prompts_of(args)
    for name in args.drafts:
        runs = [(v, k, None) for v, k in RUNS]
        if args.task == WORDS:
            # drafts at another temperature than the target's, and two at different temperatures
            runs += [(v, k, HOT) for v, k in RUNS if k < 4]
            runs += [(v, 2, (HOT, 1.0)) for v in ("canonical", "recursive")]
        for verifier, k, heat in [r for r in runs if r[0] in args.verifiers]:
            drafter = draft_of(name, engine, k=k, depth=LENGTH, temperature=heat)
            totals = drawn(
                engine,
                prompts,
                args,
                drafter=drafter,
                verifier=verifier,
                temperature=1.0,
                top_p=0.95,
                budget=k * LENGTH * len(prompts) * args.samples,
            )
            laws = {None: "one", HOT: f"all at {HOT}"}.get(heat, f"at {HOT} and 1.0")
            row = {"task": args.task, "draft": name, "verifier": verifier, "K": k, "laws": laws}
            yield row | totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="part", help="pool, sequences; or both")
    parser.add_argument("--task", default=WORDS, choices=[WORDS, *TASKS])
    parser.add_argument("--drafts", nargs="+", default=["first-20", "rounded"])
    parser.add_argument("--verifiers", nargs="+", default=sorted({v for v, _ in RUNS}))
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--nodes", type=int, default=8, help="drafted tokens a sample, for pool")
    parser.add_argument("--k", type=int, default=4, help="children of a node, for pool")
    parser.add_argument("--json", help="write here, and keep what is there of other rows")
    parser.add_argument("--table", metavar="FILE", help="print this file's tables instead")
    args = parser.parse_args()
    if args.table:
        print("\n\n".join(tables(json.loads(Path(args.table).read_text()))))
        return
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"part must be one of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    result: dict = {"bench": "draft_model"}
    if args.json and Path(args.json).exists():
        result = json.loads(Path(args.json).read_text())
    engine = csd.Engine(smollm2_path(), dtype=torch.float32)
    # warm-up: reads pages and packs weights before any figure
    drawn(engine, chats(1), argparse.Namespace(samples=1, tokens=4), speculate=False)
    arguments = {k: v for k, v in vars(args).items() if k not in ("json", "table")}
    ran = {"machine": machine(), "arguments": arguments}
    fields = {
        "pool": ("task", "drafter", "nodes a sample"),
        "sequences": ("task", "draft", "verifier", "K", "laws"),
    }
    for part in args.parts or PARTS:
        ways = args.drafts if part == "pool" else [*args.drafts, *args.verifiers]
        ways = ways if args.task == WORDS else [args.task, *ways]
        result.setdefault("runs", {})[" ".join([part, *ways])] = ran
        # rows of older files have no task: they are word problems
        result[part] = [{"task": WORDS} | row for row in result.get(part, [])]
        for row in {"pool": pool, "sequences": sequences}[part](engine, args):
            result[part] = merged(result[part], [row], fields[part])
            write(result, args.json)
            named = [str(row[name]) for name in fields[part]]
            print(*named, f"tau {tau(row):.3f} {row['seconds']:.0f} s", flush=True)
    finish(result, args.json)


if __name__ == "__main__":
    main()
