"""Limits of csd: the remaining gain if there is little to draft from.

    python -m bench limits --json bench/results/limits.json

Replays recorded samples of SmolLM2-135M (`bench/traces/study.jsonl.gz`) under conditions that
remove what drafts depend on: siblings, agreement, length, peaked probabilities, idle arithmetic. A
row has tau with 8 drafted tokens per sample and step, with its 95% interval over prompts, and the
best expected speed-up of all budgets with the step times of `bench/results/step_times.json`,
without the drafter's own time. A second table has the live runs from the result file of
`bench.cpu`.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

import bench
from bench.lib.common import finish, interval, table
from csd.engine.step.budget import StepTimeTable
from csd.evaluate.replay import gain
from csd.traces.traces import Trace, read_traces

HERE = Path(bench.__file__).parent
TRACES = HERE / "traces" / "study.jsonl.gz"
STEP_TIMES = HERE / "results" / "step_times.json"
LIVE = HERE / "results" / "cpu.json"
NODES, BUDGETS = 8, (0, 1, 2, 4, 8, 16)


def cut(trace: Trace, tokens: int) -> Trace:
    """Trace with the first `tokens` tokens of each sample."""
    top = None if trace.top is None else [x[:tokens] for x in trace.top]
    return replace(trace, samples=[x[:tokens] for x in trace.samples], top=top)


def conditions(traces: list[Trace]) -> Iterator[tuple[str, list[Trace], int]]:
    """Yield cases: a name of the condition, its traces, and the number of samples."""

    def of(kind: str, temperature: float) -> list[Trace]:
        end = f"@{temperature}"
        return [
            t for t in traces if str(t.problem).startswith(kind) and str(t.problem).endswith(end)
        ]

    sums = of("sums/", 0.7)
    yield "word problems, temperature 0.7", sums, 8
    yield "one sample", sums, 1
    yield "two samples", sums, 2
    yield "32 samples in flight", sums, 32
    for tokens in (8, 16, 32):
        yield f"answers of {tokens} tokens", [cut(t, tokens) for t in sums], 8
    yield "temperature 1.0", of("sums/", 1.0), 8
    yield "temperature 1.3", of("sums/", 1.3), 8
    yield "open writing", of("writing/", 0.7), 8
    yield "open writing, temperature 1.3", of("writing/", 1.3), 8


def row(name: str, traces: list[Trace], samples: int, cost: StepTimeTable) -> dict:
    by_prompt = [gain([t], NODES, cost, samples) for t in traces]
    every = [gain(traces, n, cost, samples) for n in BUDGETS]
    best = max(every, key=lambda gains: gains["speedup"])
    # for the bootstrap over prompts: a prompt's steps are its tokens over its tau
    tokens = [sum(len(x) for x in t.samples[:samples]) for t in traces]
    steps = [n / gains["tau"] for n, gains in zip(tokens, by_prompt, strict=True)]
    low, high = interval(
        lambda pick: sum(tokens[i] for i in pick) / sum(steps[i] for i in pick), len(traces)
    )
    return {
        "condition": name,
        "prompts": len(traces),
        "samples": samples,
        "tau": sum(tokens) / sum(steps),
        "low": low,
        "high": high,
        "best nodes": best["nodes"],
        "expected speed-up": best["speedup"],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--live", type=Path, default=LIVE, help="result file of bench.e2e.cpu")
    parser.add_argument("--json", help="where to write the result")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    cost = StepTimeTable.read(STEP_TIMES)
    rows = [
        row(name, traces, samples, cost)
        for name, traces, samples in conditions(list(read_traces(args.traces)))
        if traces and all(len(t.samples) >= samples for t in traces)
    ]
    print(table(rows))
    live = json.loads(args.live.read_text())["rows"]
    columns = ("task", "samples", "tau", "csd/plain", "low", "high")
    live = [{k: r[k] for k in columns} for r in live]
    print(f"\nmeasured, {args.live.name}")
    print(table(live))
    finish({"bench": "limits", "rows": rows, "live": live}, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
