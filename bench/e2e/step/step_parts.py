"""Parts of a step's time: matrix products, attention, the rest of the layers, and each phase.

    python -m bench step_parts [MODEL] [--samples 1 4 8 16] [--nodes 0 32 64] [--dtype D]
        [--kernels default reference] [--json F]

A real generation, word problems at temperature 0.7, with a fixed number of drafted nodes per step;
the milliseconds are medians over its steps after the first `SKIP`. "products" are the layers'
matrix products, and "layers" is the rest of the forward pass without products, attention and head.
To time these parts, operations are called one by one; "one by one" is the whole step in that mode.
"step" is the step of an engine without such timing, which on a CPU may run all layers in one call,
and "over products" its ratio to the time of all matrix products, the head's included. SmolLM2-135M
when no model is given. All engines alternate; figures are medians of ROUNDS.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

import csd
from bench.e2e.cpu import PROBLEMS
from bench.lib.common import finish, table
from bench.lib.models import path_of
from csd.engine.step.step import PHASES, Step

# steps at the start, in which the samples are short and buffers are allocated
SKIP = 6
ROUNDS = 3


class Timed(csd.Engine):
    """Engine that records each step's seconds by part, or with parts=False only by phase."""

    def __init__(self, *args: Any, parts: bool = True, **options: Any):
        super().__init__(*args, **options)
        self.steps: list[dict[str, float]] = []
        self._now: dict[str, float] = defaultdict(float)
        self._phases: dict[str, float] = {}
        ops = self.ops
        if not parts:
            self.ops = replace(ops, commit_kv=self._ends_a_step(ops.commit_kv))
            return
        self.ops = replace(
            ops,
            plan_attention=self._timed("attention", ops.plan_attention),
            tree_attention=self._timed("attention", ops.tree_attention),
            commit_kv=self._ends_a_step(ops.commit_kv),
        )
        product = self.decoder.linear

        def linear(x: torch.Tensor, weight: torch.Tensor, *bias: Any) -> torch.Tensor:
            head = weight is self.decoder.head
            return self._timed("head" if head else "products", product)(x, weight, *bias)

        self.decoder.linear = linear

    def _with_settings(self, *args: Any) -> Step:
        step = super()._with_settings(*args)
        self._phases = step.seconds
        self.steps.clear()
        return step

    def _timed(self, name: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            out = function(*args, **kwargs)
            self._now[name] += time.perf_counter() - start
            return out

        return call

    def _ends_a_step(self, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.steps.append(dict(self._now) | self._phases)
            self._now.clear()
            return function(*args, **kwargs)

        return call

    def milliseconds(self) -> dict[str, float]:
        """Median milliseconds over the last call's steps, from running sums of the phases."""
        times: dict[str, list[float]] = defaultdict(list)
        for before, step in pairwise(self.steps[SKIP:]):
            for name in ("products", "head", "attention"):
                times[name].append(step.get(name, 0.0))
            for name in PHASES:
                times[name].append(step[name] - before[name])
        return {name: 1e3 * statistics.median(each) for name, each in times.items()}


def row(engine: Timed, whole: Timed, samples: int, nodes: int, tokens: int) -> dict:
    """Returns one row. engine: timed by part; whole: an equal engine, timed by phase."""
    chat = [{"role": "user", "content": PROBLEMS[0]}]
    for each in (engine, whole):
        each.generate(
            chat,
            num_samples=samples,
            max_new_tokens=tokens,
            temperature=0.7,
            seed=0,
            budget=nodes,
            speculate=nodes > 0,
            ignore_eos=True,
        )
    ms, phases = engine.milliseconds(), whole.milliseconds()
    step = sum(phases[name] for name in PHASES)
    return {
        "samples": samples,
        "nodes": nodes,
        "products": ms["products"],
        "head": ms["head"],
        "attention": ms["attention"],
        "layers": ms["forward"] - ms["products"] - ms["head"] - ms["attention"],
        **{name: ms[name] for name in PHASES if name != "forward"},
        "one by one": sum(ms[name] for name in PHASES),
        "step": step,
        "over products": step / (ms["products"] + ms["head"]),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="as of csd.generate")
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--nodes", type=int, nargs="+", default=[0, 32, 64])
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--exact", action="store_true", default=None)
    parser.add_argument("--kernels", nargs="+", default=["default"])
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    dtype = args.dtype and getattr(torch, args.dtype)
    engines = {
        name: [
            Timed(
                path_of(args.model),
                parts=parts,
                dtype=dtype,
                exact=args.exact,
                kernels=None if name == "default" else name,
            )
            for parts in (True, False)
        ]
        for name in args.kernels
    }
    rows = []
    for samples in args.samples:
        for nodes in args.nodes:
            rounds = [
                {name: row(*pair, samples, nodes, args.tokens) for name, pair in engines.items()}
                for _ in range(ROUNDS)
            ]
            for name in engines:
                runs = [each[name] for each in rounds]
                rows.append(
                    {"kernels": name}
                    | {key: statistics.median(each[key] for each in runs) for key in runs[0]}
                )
            print(table(rows[-len(engines) :]), flush=True)
    print(table(rows))
    dtype = next(iter(engines.values()))[0].dtype
    finish({"bench": "step_parts", "dtype": str(dtype), "rows": rows}, args.json)


if __name__ == "__main__":
    main()
