"""All matrix products of a forward pass on a CPU, by rows: csd's loop compared to PyTorch's.

    python -m bench products [--shape qwen2.5-0.5b] [--dtype bfloat16 float32]
        [--rows 1 2 4 8 14 16 28 32 64] [--rounds N] [--json F]

Random weights of a known shape, those of the layers and the head. "plain" is `F.linear`, "onednn"
the packed product of oneDNN, "fma" and "dot" are the loop of `csd/kernels/layers/cpu/linear.py`
with those instructions, if this CPU has them, each with prepacked weights and with plain ones, as
in a user's module. Times are milliseconds, medians over alternated rounds. "taken" is the
instruction that csd selects on this CPU, "gain" the median of the rounds' ratios of the faster of
"plain" and "onednn" to it, and "gain, plain" that of `F.linear` to it, both with plain weights.
Each side has its own copy of the weights, one after the other.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F

from bench.lib.common import finish, table
from bench.lib.shapes import SHAPES
from csd.kernels import cpu_ops as backend
from csd.models.fused.linear import onednn_multiplies

ROWS = (1, 2, 4, 8, 14, 16, 28, 32, 64)
ROUNDS = 9


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    rows = []
    for name in args.dtype:
        dtype = getattr(torch, name)
        sides = passes(args.shape, dtype)
        for m in args.rows:
            rows.append({"dtype": name, "rows": m, **measured(sides, m, dtype, args.rounds)})
            print(table(rows[-1:]), flush=True)
    print(table(rows))
    finish({"bench": "products", "shape": args.shape, "rows": rows}, args.json)


def passes(shape: str, dtype: torch.dtype) -> dict[str, Callable[[torch.Tensor], None]]:
    """Functions by side, which run all products of a pass on an input with any number of rows."""
    c = SHAPES[shape]
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    layer = (q + 2 * kv, c.hidden), (c.hidden, q), (2 * c.intermediate, c.hidden)
    sizes = [*layer, (c.hidden, c.intermediate)] * c.layers + [(c.vocab, c.hidden)]
    kinds: dict[str, tuple[Callable, Callable]] = {"plain": (lambda w: w, F.linear)}
    if onednn_multiplies(dtype):
        kinds["onednn"] = (
            lambda w: torch.ops.mkldnn._reorder_linear_weight(w, 32),
            lambda x, w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""),
        )
    for by in backend.instructions(dtype):
        kinds[by] = partial(backend.by_columns, isa=by), partial(backend.product, isa=by)
        kinds[f"{by}, plain"] = lambda w: w, partial(backend.product, isa=by)
    by_name = {}
    for name, (layout, multiply) in kinds.items():
        weights = [layout(torch.randn(size).to(dtype)) for size in sizes]

        def call(x: torch.Tensor, weights=weights, multiply=multiply) -> None:
            for weight, (_, width) in zip(weights, sizes, strict=True):
                multiply(x[:, :width].contiguous(), weight)

        by_name[name] = call
    return by_name


def measured(sides: dict[str, Callable], rows: int, dtype: torch.dtype, rounds: int) -> dict:
    c = max(SHAPES.values(), key=lambda c: c.intermediate)
    x = torch.randn(rows, c.intermediate).to(dtype)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side(x)
    for turn in range(rounds):
        for name in list(sides) if turn % 2 else list(sides)[::-1]:
            start = time.perf_counter()
            sides[name](x)
            seconds[name].append(time.perf_counter() - start)
    figures: dict = {name: 1e3 * statistics.median(each) for name, each in seconds.items()}
    if (taken := backend.instruction(dtype)) is not None:
        pytorch = zip(*(seconds[x] for x in ("plain", "onednn") if x in seconds), strict=True)
        figures |= {"taken": taken, "gain": _gain(map(min, pytorch), seconds[taken])}
        if f"{taken}, plain" in seconds:
            figures["gain, plain"] = _gain(seconds["plain"], seconds[f"{taken}, plain"])
    return figures


def _gain(others: Iterable[float], own: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(others, own, strict=True))


if __name__ == "__main__":
    main()
