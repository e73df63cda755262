"""Seconds of the module decoder's pass over a step's rows, compared to the module's own forward.

    python -m bench module_step [--rows N ..] [--rounds N] [--dtype float32] [--json F]

Qwen2.5-0.5B's shape with random weights on a CPU, 8 samples in flight after a prompt of 128 tokens.
The module's own forward runs over as many tokens, with a mask and without a cache, so it attends to
fewer keys. A figure is the median over alternated rounds; the ratio is the median of the rounds'
ratios.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
import transformers

import csd
from bench.lib.common import finish, table
from bench.lib.step_pass import DTYPES, SHAPE, alternated, filled, passes


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    config = transformers.Qwen2Config(**SHAPE)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[args.dtype]).eval()
    engine = csd.Engine(model, decoder="module")
    step = filled(engine)
    rows = []
    for count in args.rows:
        seconds = alternated(
            {"pass": passes(step, count), "own": forwards(model, count)}, args.rounds
        )
        ratios = [a / b for a, b in zip(seconds["pass"], seconds["own"], strict=True)]
        rows.append(
            {
                "rows": count,
                "pass, ms": 1e3 * statistics.median(seconds["pass"]),
                "own forward, ms": 1e3 * statistics.median(seconds["own"]),
                "ratio": statistics.median(ratios),
            }
        )
    print(table(rows))
    finish({"bench": "module_step", "dtype": args.dtype, "rows": rows}, args.json)


def forwards(model: torch.nn.Module, rows: int) -> Callable[[], object]:
    ids = torch.randint(1000, (1, rows))

    @torch.no_grad()
    def run() -> object:
        return model(ids, use_cache=False)

    return run


if __name__ == "__main__":
    main()
