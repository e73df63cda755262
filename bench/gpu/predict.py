"""Predicted time of a decoding step on a GPU, from bytes moved and products of its launches.

    python -m bench predict [--results DIR] --json F

Nothing is measured here. Each launch of a step takes the longest of its bytes over BANDWIDTH, its
products over RATE, and LEAST. The first two are an H200's data sheet times the share that large
copies and products usually reach; LEAST is the time of a small kernel in a CUDA graph that waits
for the previous one. All three are assumptions. Drafting, inserting and sampling are chains of
dependent work whose time bytes do not predict: except for the logits they count as launches only,
so the prediction is below a device's time. "exact ms" is the step with `exact=True`: split K, whose
parts the next operation adds, and SwiGLU within its product. "gated ms" is the default step with
only SwiGLU within its product, if that product were as fast as cuBLAS's; nothing is gained if it is
slower by more than the share "gated product may be slower". With --results, the folder of
`python -m bench.gpu --out DIR`, a column has the device's measured step with as many samples and
about as many rows.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.gpu.lib.roofline import step_seconds
from bench.gpu.lib.workload import matrices
from bench.lib.common import finish, table
from bench.lib.shapes import SHAPES
from csd.kernels.layers.row_linear import splits_of
from csd.models.fused.config import ModelConfig

# NVIDIA's data sheet of the H200 SXM: bytes per second, dense bfloat16 operations per second
BANDWIDTH, RATE = 0.9 * 4.8e12, 0.8 * 989e12
# seconds of a kernel that does nearly nothing, after another one in a graph
LEAST = 2e-6
# (samples of one prompt, rows of the step)
STEPS = ((1, 1), (1, 16), (16, 16), (16, 64), (16, 128), (16, 192), (64, 64), (64, 256))
PROMPT, GENERATED = 1024, 256
# launches of a step outside its layers: propose, plan, commit and insert, and verify after the read
# of all logits (`tests/helpers/kernels/step_kernels.py`); bytes of a number in bfloat16
OTHERS, ITEM = 12, 2
LARGE = ("llama-3.1-8b", "qwen2.5-7b")

Launch = tuple[float, float]  # bytes, operations


def launches(
    c: ModelConfig, samples: int, rows: int, exact: bool, gated: bool = False, attends: bool = True
) -> Iterator[Launch]:
    """Launches of a step over `rows` rows of `samples` samples of one prompt.

    gated: SwiGLU within its product, as always with `exact`. attends: True includes attention.
    """
    for _ in range(c.layers):
        for name, (n, k) in matrices(c).items():
            if gated and name == "gate_up":
                yield ITEM * (n * k + rows * (k + n // 2)), 2 * rows * n * k
                continue
            yield from product(n, k, rows, exact, "" if name == "qkv" and c.qk_norm else name)
        if attends:
            yield from attention(c, samples, rows)
        # norms with their residuals; norms of heads if the model has them; rotary; SwiGLU
        for _ in range(2):
            yield 4 * ITEM * rows * c.hidden, 0
        for _ in range(2 * c.qk_norm):
            yield 2 * ITEM * rows * c.heads * c.head_dim, 0
        yield 2 * ITEM * rows * (c.heads + 2 * c.kv_heads) * c.head_dim, 0
        if not exact and not gated:
            yield 3 * ITEM * rows * c.intermediate, 0
    yield from product(c.vocab, c.hidden, rows, exact)
    # the last norm, the first read of the logits; the first norm reads the embedding
    yield from ((4 * ITEM * rows * c.hidden, 0), (ITEM * rows * c.vocab, 0))
    yield from ((0, 0) for _ in range(OTHERS))


def product(n: int, k: int, rows: int, exact: bool, name: str = "") -> Iterator[Launch]:
    splits = splits_of(n, k, torch.bfloat16)[0] if exact else 1
    result = ITEM * rows * n
    partial = 4 * splits * rows * n if splits > 1 else result
    if exact and name == "gate_up" and splits == 1:
        partial //= 2
    read = 0
    if splits > 1 and name in ("qkv", "out", "down"):
        # additional bytes that the following rotary or norm reads, compared to one result
        read = partial - result
    yield ITEM * (n * k + rows * k) + partial + read, 2 * rows * n * k
    if splits > 1 and not read:
        yield partial + result, 0


def attention(c: ModelConfig, samples: int, rows: int) -> Iterator[Launch]:
    """Launches of attention: keys and values once, two partial results per row, and their merge."""
    tokens = PROMPT + samples * GENERATED
    partial = 2 * 4 * rows * c.heads * (c.head_dim + 1)
    own = 4 * rows * c.heads * c.head_dim * (PROMPT + GENERATED)
    yield 2 * ITEM * tokens * c.kv_heads * c.head_dim + partial, own
    yield partial + ITEM * rows * c.heads * c.head_dim, 0


def seconds(
    c: ModelConfig, samples: int, rows: int, exact: bool = False, gated: bool = False
) -> float:
    launched = launches(c, samples, rows, exact, gated)
    return sum(max(b / BANDWIDTH, f / RATE, LEAST) for b, f in launched)


def gated_product(c: ModelConfig, rows: int) -> float:
    """Seconds of a layer's product of gate and up, with SwiGLU within it."""
    n, k = matrices(c)["gate_up"]
    moved = ITEM * (n * k + rows * (k + n // 2))
    return max(moved / BANDWIDTH, 2 * rows * n * k / RATE, LEAST)


def row(name: str, samples: int, rows: int, measured: list[dict]) -> dict:
    c = SHAPES[name]
    bound = step_seconds(
        c,
        rows=rows,
        live=samples,
        prompts=[PROMPT],
        context=GENERATED,
        bandwidth=BANDWIDTH,
        flops=RATE,
    )
    step, gated = seconds(c, samples, rows), seconds(c, samples, rows, gated=True)
    near = [
        r["step ms"]
        for r in measured
        if r["shape"] == name and r["N"] == samples and abs(r["rows"] - rows) <= rows / 8
    ]
    return {
        "shape": name,
        "samples": samples,
        "rows": rows,
        "launches": sum(1 for _ in launches(c, samples, rows, False)),
        "bound ms": bound * 1e3,
        "predicted ms": step * 1e3,
        "predicted share of bound": bound / step,
        "exact launches": sum(1 for _ in launches(c, samples, rows, True)),
        "predicted exact ms": seconds(c, samples, rows, exact=True) * 1e3,
        "predicted gated ms": gated * 1e3,
        "gated product may be slower": (step - gated) / (c.layers * gated_product(c, rows)),
        "predicted over plain": step / seconds(c, samples, samples),
        "device ms": near[0] if near else None,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, help="folder of bench.gpu's result files")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    measured = []
    if args.results:
        measured = json.loads((args.results / "end_to_end.json").read_text())["rows"]
    rows = [row(name, n, m, measured) for name in LARGE for n, m in STEPS]
    print(table(rows))
    assumed = dict(bandwidth=BANDWIDTH, rate=RATE, least_us=LEAST * 1e6)
    finish({"bench": "roofline", "assumed": assumed, "rows": rows}, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
