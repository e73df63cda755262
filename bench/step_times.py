"""Seconds of a step by its rows, as an engine measures them when it starts.

    python -m bench.step_times [MODEL] [--json F]

Forward and verify over empty caches; SmolLM2-135M when no model is given. `csd replay --cost F`
takes the file. Beside them on a CPU, in turns: the same step with PyTorch's own float32 products in
place of oneDNN's (`csd/models/linear.py`). Each is the least of all rounds.
"""

import argparse

import torch

import csd
from bench.common import finish, machine, table
from csd.models.demo import smollm2_path

ROUNDS = 3


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="as of csd.generate")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    engine = csd.Engine(args.model or smollm2_path())
    sides: dict[str, list] = {"seconds": []}
    if engine.device.type == "cpu":
        sides["seconds without oneDNN"] = []
    for _ in range(args.rounds):
        for name, found in sides.items():
            with torch.backends.mkldnn.flags(enabled=name == "seconds"):
                found.append(engine.measure_steps())
    rows = sides["seconds"][0].sizes
    result = {"bench": "step_times", "machine": machine(), "rows": rows}
    for name, found in sides.items():
        result[name] = [min(times) for times in zip(*(f.seconds for f in found), strict=True)]
    print(table([{"rows": m} | {n: result[n][i] for n in sides} for i, m in enumerate(rows)]))
    finish(result, args.json)


if __name__ == "__main__":
    main()
