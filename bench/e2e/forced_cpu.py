"""Speed of a model's shape with random weights on a CPU, which commits recorded samples.

    python -m bench forced_cpu TRACES [--shape qwen2.5-0.5b] [--samples 4 8] [--nodes auto 32 64]
        [--prompts 4] [--tokens 96] [--pairs 3] [--json F]

Every step runs completely, with random weights, and commits the tokens of the trace
(`bench/lib/forced.py`), so tokens and noise are the recorded ones and the time is that of the
shape. Runs with and without drafts alternate. The report has tau and the ratio of tokens per second
with drafts to those without, the median over prompts and pairs with its bootstrap interval. csd
must have recorded the trace.
"""

import argparse
import statistics
import time

import torch

import csd
from bench.gpu.lib.workload import forced
from bench.lib.common import bootstrap, drafting, finish, table
from bench.lib.forced import cut, forcing
from bench.lib.shapes import SHAPES, random_model
from csd.models.fused.fuse import pack
from csd.models.load import Loaded
from csd.traces.traces import Trace, read_traces


def engine_of(shape: str, dtype: torch.dtype) -> csd.Engine:
    decoder = random_model(shape, dtype=dtype)
    pack(decoder)
    return csd.Engine(Loaded(decoder, decoder.config, None, None, torch.device("cpu"), dtype))


def measure(
    engine: csd.Engine, traces: list[Trace], samples: int, nodes: list[str], pairs: int
) -> list[dict]:
    """Returns one row for each of `nodes`."""
    ratios: dict[str, list[float]] = {name: [] for name in nodes}
    rates: dict[str, list[float]] = {name: [] for name in ("none", *nodes)}
    taus: dict[str, list[float]] = {name: [] for name in nodes}
    for trace in traces:
        with forcing(engine, [trace]):
            run = forced(engine, [trace], 0)
            count = sum(map(len, trace.samples))
            for pair in range(pairs):
                seconds, tau = {}, {}
                sides = ["none", *nodes]
                for name in sides if pair % 2 else sides[::-1]:
                    start = time.perf_counter()
                    outputs = run(**drafting(name))
                    seconds[name] = time.perf_counter() - start
                    tau[name] = outputs[0].stats.tokens_per_step
                for name in sides:
                    rates[name].append(count / seconds[name])
                for name in nodes:
                    ratios[name].append(seconds["none"] / seconds[name])
                    taus[name].append(tau[name])
    rows = []
    for name in nodes:
        low, high = bootstrap(ratios[name])
        rows.append(
            {
                "samples": samples,
                "nodes": name,
                "tau": statistics.median(taus[name]),
                "csd tok/s": statistics.median(rates[name]),
                "no drafts tok/s": statistics.median(rates["none"]),
                "csd/no drafts": statistics.median(ratios[name]),
                "low": low,
                "high": high,
            }
        )
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--samples", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--nodes", nargs="+", default=["auto"], help="a step's, or auto")
    parser.add_argument("--prompts", type=int, default=4, help="the first so many")
    parser.add_argument("--tokens", type=int, default=96, help="of a sample, at most")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    engine = engine_of(args.shape, getattr(torch, args.dtype))
    every, rows = list(read_traces(args.traces))[: args.prompts], []
    # warm-up: compile, and measure once
    measure(engine, [cut(every[0], args.samples[0], 16)], args.samples[0], args.nodes, 1)
    for samples in args.samples:
        traces = [cut(trace, samples, args.tokens) for trace in every]
        rows += measure(engine, traces, samples, args.nodes, args.pairs)
        print(table(rows), flush=True)
    finish(
        {
            "bench": "forced_cpu",
            "shape": args.shape,
            "traces": args.traces,
            "dtype": args.dtype,
            "exact": engine.exact,
            "prompts": len(every),
            "pairs": args.pairs,
            "rows": rows,
        },
        args.json,
    )


if __name__ == "__main__":
    main()
