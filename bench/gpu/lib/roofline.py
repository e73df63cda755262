"""Lower bound of a step's time: bytes over bandwidth or FLOPs over rate, the longer of both.

    weights    max( 2 P / B,             2 P M / F )
    prompts    max( k sum of prompts / B, a M prompt / F )
    samples    max( k S context / B,      a M context / F )

P parameters without the embedding's, M rows, S live samples or distinct texts, k bytes of keys and
values per token, a = 4 H D L FLOPs per row and token of context; B and F are given, or measured by
`measure`. Nothing overlaps, and norms, logits, sampling and drafting are free.
"""

import time

import torch

from csd.kernels.common.gpu import has_bfloat16
from csd.models.fused.config import ModelConfig


def parameters(c: ModelConfig) -> int:
    """Number of weights that a step reads."""
    qkv = c.hidden * (c.heads + 2 * c.kv_heads) * c.head_dim
    layer = qkv + c.heads * c.head_dim * c.hidden + 3 * c.hidden * c.intermediate
    return c.layers * layer + c.vocab * c.hidden


def step_seconds(
    c: ModelConfig,
    *,
    rows: float,
    live: float,
    prompts: list[int],
    context: float,
    bandwidth: float,
    flops: float,
    itemsize: int = 2,
) -> float:
    """Seconds of a step over `rows` rows of `live` samples with `context` tokens each so far."""
    p = parameters(c)
    token_bytes = 2 * c.layers * c.kv_heads * c.head_dim * itemsize
    token_flops = 4 * c.layers * c.heads * c.head_dim

    def phase(read: float, worked: float) -> float:
        return max(read / bandwidth, worked / flops)

    mean = sum(prompts) / len(prompts)
    return (
        phase(itemsize * p, 2 * p * rows)
        + phase(token_bytes * sum(prompts), token_flops * rows * mean)
        + phase(token_bytes * live * context, token_flops * rows * context)
    )


def measure(device: torch.device, repeats: int = 5) -> dict:
    """Bytes per second of a copy, reads and writes counted, and FLOP/s of a product of 16 bits."""
    cuda = device.type == "cuda"
    n, m = (1 << 30, 8192) if cuda else (1 << 26, 512)
    source = torch.zeros(n, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    half = torch.bfloat16 if has_bfloat16(device) else torch.float16
    x = torch.randn(m, m, device=device).to(half if cuda else torch.float32)
    return {
        "bandwidth": 2 * n / _seconds(lambda: target.copy_(source), cuda, repeats),
        "flops": 2 * m**3 / _seconds(lambda: x @ x, cuda, repeats),
    }


def _seconds(call, cuda: bool, repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls."""
    best = float("inf")
    for _ in range(repeats):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(4):
            call()
        if cuda:
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / 4)
    return best
