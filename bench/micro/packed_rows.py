"""Attention of a prompt's samples, forward and backward: packed rows against one row per sample.

    python -m bench packed_rows [--shapes P+NxL ..] [--rounds N] [--dtype float32] [--device cpu]
        [--json F]

SmolLM2-135M's heads. P+NxL: a prompt of P tokens and N samples of L. "packed" is
`csd.kernels.packed_attention` with the prompt once, "sdpa" PyTorch's causal attention of a batch of
N rows of P + L tokens. A figure is the median over alternated rounds, a ratio the median of the
rounds' ratios; on a CPU, times are the process's processor time.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from bench.lib.common import finish, table
from bench.lib.step_pass import DTYPES
from csd.kernels import pack_rows, packed_attention

H, K, D = 9, 3, 64
SHAPES = ["500+8x100", "100+8x400"]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    rows = []
    for shape in args.shapes:
        prompt, _, samples = shape.partition("+")
        sizes = int(prompt), *map(int, samples.split("x"))
        made = sides(*sizes, DTYPES[args.dtype], args.device)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
        for turn in range(args.rounds + 2):
            for name, run in made.items():
                seconds = run()
                # the first two warm up
                if turn >= 2:
                    times[name].append(seconds)
        row: dict[str, object] = {"shape": shape}
        for i, part in enumerate(("forward", "backward")):
            for name, seconds in times.items():
                row[f"{name} {part}, ms"] = 1e3 * statistics.median(t[i] for t in seconds)
        pairs = zip(times["sdpa"], times["packed"], strict=True)
        row["sdpa / packed"] = statistics.median(sum(a) / sum(b) for a, b in pairs)
        rows.append(row)
    print(table(rows))
    finish({"bench": "packed", "dtype": args.dtype, "device": args.device, "rows": rows}, args.json)


def sides(
    prompt: int, samples: int, length: int, dtype: torch.dtype, device: str
) -> dict[str, Callable[[], tuple[float, float]]]:
    """Returns calls that give the seconds of a forward and of a backward pass."""
    # no completion begins as another does
    completions = [[n * length + i for i in range(length)] for n in range(samples)]
    packed = pack_rows([range(prompt)], [completions], device)
    R = len(packed.token)
    own = torch.arange(prompt, R, device=device).view(samples, length)
    index = torch.cat((torch.arange(prompt, device=device).expand(samples, -1), own), 1)
    operands = [torch.randn(R, n, D, dtype=dtype, device=device) for n in (H, K, K, H)]
    *qkv, grad = operands
    batch = [x[index].transpose(1, 2).contiguous() for x in operands]
    leaves = [x.clone().requires_grad_() for x in qkv]
    batch_leaves = [x.requires_grad_() for x in batch[:3]]

    def timed(call: Callable, of: list[torch.Tensor], grad: torch.Tensor) -> tuple[float, float]:
        for x in of:
            x.grad = None
        start = clock(grad)
        out = call()
        between = clock(grad)
        out.backward(grad)
        return between - start, clock(grad) - between

    def attend() -> torch.Tensor:
        return packed_attention(*leaves, packed.layout, D**-0.5)[0]

    def sdpa() -> torch.Tensor:
        return F.scaled_dot_product_attention(*batch_leaves, is_causal=True, enable_gqa=True)

    return {
        "packed": lambda: timed(attend, leaves, grad),
        "sdpa": lambda: timed(sdpa, batch_leaves, batch[3]),
    }


def clock(x: torch.Tensor) -> float:
    if not x.is_cuda:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
