"""Replay traces with several drafters: tokens per step, nodes, microseconds, sources of tokens.

python -m bench replay TRACES --drafters consensus prompt-lookup --samples 8 --nodes 4 16 --json F

Samples of a problem advance together; a step drafts at most `nodes` tokens per live sample, without
the roots. tau is tokens committed per sample and step, with the 95% interval of a bootstrap over
problems; the ratios to the best other drafters have their own intervals, over the same problems.
Further columns, as in papers on drafters: accepted drafted tokens per sample and step (length),
their share of the drafted nodes (accept), and the drafter's time for one sample's draft, without
insertion (draft, in microseconds of CPU time, which other programs change little).

`--prior halves` replays every second problem with the graph alone and with a prior learnt from the
other problems' samples, or from the files of `--learn`; `--prior call` replays all problems in
order, each with a prior of those before it. Their rows have the ratio of the two, with its interval
over problems, and the ratio of the drafter's times.

New rows replace the same rows of an existing F one by one, so a long run can be split by trace,
drafter, samples and nodes, and an interrupted run keeps its rows. `--table F` prints the tables of
such a file instead.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.lib.common import finish, interval, machine, merged, write
from bench.studies.drafting.baselines import RIVALS, make_rival
from bench.studies.drafting.replay_rows import KEY, add_ratios, ratio, tables, text
from csd.engine.results.record import SOURCES
from csd.evaluate.replay import Replayed, replay
from csd.graph.prior import DEFAULT_CONTEXTS, MAX_CONTEXTS, Prior, is_prior
from csd.graph.registry import make_drafter, names
from csd.kernels.backends import choose
from csd.kernels.ops import reference
from csd.traces.traces import Trace, read_traces

# variants of csd's own drafter that show the gain of one of its parts
ABLATIONS = ("consensus-uncoupled", "consensus-counts")
PRIORS = ("halves", "call")


def make(name: str, traces: list[Trace], problem) -> object:
    """Make a drafter; one that reads a datastore gets the other problems of the traces."""
    if name in RIVALS:
        return make_rival(name, [t for t in traces if t.problem != problem])
    return make_drafter(name, reference(), torch.device("cpu"))


def run(
    name, traces, samples, nodes, share=False, seed=0, others=None, share_rows=False
) -> list[Replayed]:
    """Replay all problems with one drafter. others: traces that a datastore may contain."""
    base = "consensus" if name in ABLATIONS else name
    out = []
    for trace in traces:
        drafter = make(base, others or traces, trace.problem)
        if name == "consensus-counts":
            trace = Trace(trace.problem, trace.prompt, trace.samples, trace.temperature, None)
        options = dict(share=share, share_rows=share_rows, coupled=name not in ABLATIONS)
        out.append(
            replay(trace, drafter, samples, nodes, seed=seed, clock=time.process_time, **options)
        )
    return out


def tau(results: list[Replayed]) -> float:
    return sum(r.tokens for r in results) / sum(r.sample_steps for r in results)


def summary(name: str, results: list[Replayed], samples: int, nodes: int) -> dict:
    def total(field):
        return sum(getattr(r, field) for r in results)

    tokens, steps, each = total("tokens"), total("steps"), total("sample_steps")
    accepted = sum(sum(r.sources[1:]) for r in results)
    sources = [sum(r.sources[i] for r in results) / tokens for i in range(len(SOURCES))]
    return {
        "drafter": name,
        "samples": samples,
        "nodes": nodes,
        "tau": tau(results),
        "interval": interval(lambda pick: tau([results[i] for i in pick]), len(results)),
        "rows_per_token": total("model_rows") / tokens,
        "nodes_used": total("nodes") / total("sample_steps"),
        "accepted_length": accepted / each,
        "acceptance": accepted / max(total("nodes"), 1),
        "draft_microseconds": 1e6 * total("propose_seconds") / each,
        "microseconds": 1e6 * (total("propose_seconds") + total("insert_seconds")) / steps,
        "makespan": steps,
        "plain_makespan": total("plain_steps"),
        "sources": dict(zip(("target", *SOURCES[1:]), sources, strict=True)),
        "problems": len(results),
        "by_problem": {
            field: [getattr(r, field) for r in results]
            for field in ("problem", "tokens", "sample_steps")
        },
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*")
    parser.add_argument(
        "--drafters",
        nargs="+",
        default=["consensus", "prompt-lookup"],
        choices=[*names(), *ABLATIONS, *RIVALS],
        metavar="NAME",
    )
    parser.add_argument("--samples", type=int, nargs="+", default=[8])
    parser.add_argument("--nodes", type=int, nargs="+", default=[16])
    parser.add_argument(
        "--prior",
        choices=PRIORS,
        help="compare the graph alone to it with a prior of other problems, in place of --drafters",
    )
    parser.add_argument(
        "--learn",
        nargs="+",
        default=[],
        metavar="FILE",
        help="traces or priors from which `--prior halves` learns in place of the other problems",
    )
    parser.add_argument("--problems", type=int, help="the first so many of each file")
    parser.add_argument("--skip", type=int, default=0, help="without these first ones")
    parser.add_argument(
        "--share", action="store_true", help="samples that ended leave their nodes to the others"
    )
    parser.add_argument(
        "--share-rows",
        action="store_true",
        help="also with rows of the model that samples with equal text share",
    )
    parser.add_argument("--without-top", action="store_true", help="ignore recorded probabilities")
    parser.add_argument("--seed", type=int, default=0, help="of the posterior noise")
    parser.add_argument("--json", help="write here, and keep what is there of other rows")
    parser.add_argument("--table", metavar="FILE", help="print this file's tables instead")
    args = parser.parse_args(argv)
    if args.table:
        print("\n\n".join(tables(json.loads(Path(args.table).read_text())["rows"])))
        return
    if not args.traces:
        parser.error("give a file of traces, or --table FILE")
    torch.set_num_threads(1)
    result: dict = {"bench": "replay", "runs": {}, "rows": []}
    if args.json and Path(args.json).exists():
        result = json.loads(Path(args.json).read_text())
    arguments = {k: v for k, v in vars(args).items() if k not in ("json", "table")}
    arguments |= {name: [*map(_name, arguments[name])] for name in ("traces", "learn")}
    drafters = ["prior", args.prior, *map(_name, args.learn)] if args.prior else args.drafters
    what = [*arguments["traces"], *drafters, *map(str, [*args.samples, *args.nodes])]
    start = time.time()
    for path in args.traces:
        for row in _rows(path, args):
            result["rows"] = merged(result["rows"], [row], KEY)
            ran = {"machine": machine(), "arguments": arguments, "seconds": time.time() - start}
            result.setdefault("runs", {})[" ".join(what)] = ran
            write(result, args.json)
            print(text([row]), flush=True)
    add_ratios(result["rows"])
    finish(result, args.json)


def _name(path: str) -> str:
    return Path(path).name.split(".jsonl")[0].removesuffix(".csdprior")


def _rows(path: str, args) -> Iterator[dict]:
    """Yield rows of one file: every drafter, budget, and number of samples that the file has."""
    traces = list(read_traces(path))
    if args.without_top:
        for trace in traces:
            trace.top = None
    stop = None if args.problems is None else args.skip + args.problems
    # a datastore also has the problems that are not replayed
    others, traces = traces, traces[args.skip : stop]
    recorded = min(len(t.samples) for t in traces)
    if args.prior:
        yield from _prior_rows(path, args, traces, recorded)
        return
    for samples in (n for n in args.samples if n <= recorded):
        for nodes in args.nodes:
            for name in args.drafters:
                for shared in (False, True) if args.share_rows else (False,):
                    replays = run(
                        name, traces, samples, nodes, args.share, args.seed, others, shared
                    )
                    of = f"{name}, shared rows" if shared else name
                    yield {"trace": _name(path)} | summary(of, replays, samples, nodes)


def _prior_rows(path: str, args, traces: list[Trace], recorded: int) -> Iterator[dict]:
    """Yield rows of the graph alone and with a prior, by samples and nodes."""
    files, learnt = [f for f in args.learn if is_prior(f)], []
    if args.prior == "halves":
        learnt = [t for file in args.learn if file not in files for t in read_traces(file)]
        learnt, traces = traces[::2] if not args.learn else learnt, traces[1::2]
    # recordings without probabilities have no noise, and run the machine's own loops
    ops = choose(None, torch.device("cpu"), torch.float32)
    source = " + ".join(map(_name, args.learn)) or args.prior

    # a prior's file may have an entry of each token
    contexts = MAX_CONTEXTS if files else DEFAULT_CONTEXTS

    def drafter(prior: Prior | None = None) -> Any:
        size = 0 if prior is None else contexts
        made = make_drafter("consensus", ops, torch.device("cpu"), prior_contexts=size)
        made.use_prior(prior)
        return made

    # compile the loops outside the drafter's times
    short = replace(traces[0], samples=[traces[0].samples[0][:8]], top=None)
    for warm in (None, Prior(contexts=contexts)):
        replay(short, drafter(warm), 1, 4)
    for samples in (n for n in args.samples if n <= recorded):
        for nodes in args.nodes:
            options = dict(share=args.share, seed=args.seed, clock=time.process_time)
            prior, results, alone = Prior(contexts=contexts), [], []
            for file in files:
                prior.merge(Prior.load(file))
            for trace in learnt:
                prior.add(trace.prompt, trace.samples, trace.top)
            for trace in traces:
                alone.append(replay(trace, drafter(), samples, nodes, **options))
                results.append(replay(trace, drafter(prior), samples, nodes, **options))
                if args.prior == "call":
                    prior.add(
                        trace.prompt, trace.samples[:samples], trace.top and trace.top[:samples]
                    )
            first = summary(f"consensus, {args.prior}", alone, samples, nodes)
            row = summary(f"prior of {source}", results, samples, nodes)
            row |= {"learnt_tokens": prior.tokens, "learnt": [_name(x) for x in args.learn]}
            row["ratio"] = ratio(row, first, range(len(traces)))
            row["ratio_interval"] = interval(partial(ratio, row, first), len(traces))
            row["draft_ratio"] = row["draft_microseconds"] / first["draft_microseconds"]
            for each in (first, row):
                yield {"trace": _name(path), "prior": args.prior} | each


if __name__ == "__main__":
    main()
