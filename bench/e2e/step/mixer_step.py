"""Seconds of one layer with a state in a step: trees of drafts, compared to roots alone.

    python -m bench mixer_step [--slots N ..] [--nodes N] [--layers N] [--rounds N] [--json F]

csd's part of a mixer, convolution and gated delta rule, at the sizes of Qwen3-Next's layers in
float32 on a CPU, without the projections before and after it. Each slot has a text of 300 tokens.
"nodes" has N rows in trees over the slots, "roots" one row per slot, and "rows" as many roots as
"nodes" has rows, each in its own slot. A figure is the median over alternated rounds, with more
layers than fit in the cache; a ratio is the median of the rounds' ratios.
"""

import argparse
import statistics

import torch

from bench.e2e.step.module_step import alternated
from bench.lib.common import finish, table
from bench.micro.jobs.state_jobs import QWEN3_NEXT, StateStep
from csd.kernels.backends import choose

TEXT = 300


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kernels", default=None)
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    ops = choose(args.kernels, torch.device("cpu"), torch.float32)

    def layers(slots: int, rows: int) -> list[StateStep]:
        return [StateStep(ops, QWEN3_NEXT, slots, rows, TEXT, i) for i in range(args.layers)]

    def run(steps: list[StateStep]):
        return lambda: [step.core() for step in steps]

    rows = []
    for slots in args.slots:
        sides = {
            "nodes": layers(slots, args.nodes // slots * slots),
            "roots": layers(slots, slots),
            "rows": layers(args.nodes, args.nodes),
        }
        seconds = alternated({name: run(steps) for name, steps in sides.items()}, args.rounds)
        medians = {name: 1e3 * statistics.median(x) / args.layers for name, x in seconds.items()}
        row: dict = {"slots": slots} | {f"{name}, ms": ms for name, ms in medians.items()}
        for other in ("roots", "rows"):
            pairs = zip(seconds["nodes"], seconds[other], strict=True)
            row[f"nodes / {other}"] = statistics.median(a / b for a, b in pairs)
        rows.append(row)
    print(table(rows))
    state = QWEN3_NEXT.slot_bytes(torch.float32)
    finish(
        {
            "bench": "mixer_step",
            "backend": ops.name,
            "nodes": args.nodes,
            "threads": torch.get_num_threads(),
            "MB of a slot and layer": state / 1e6,
            "rows": rows,
        },
        args.json,
    )


if __name__ == "__main__":
    main()
