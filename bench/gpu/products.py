"""Time of cuBLAS by the number of rows, for the products of a layer, which sets the cost of drafts.

Each row also has whether results equal those among 16 rows bit by bit: if not, bfloat16 tokens may
depend on the drafts.
"""

import torch
import torch.nn.functional as F

from bench.gpu.section import Section
from bench.gpu.workload import shapes
from bench.micro.timing import copies_for, copy_bandwidth, replayed
from csd.engine.step.static_step import SIZES
from csd.models.fused.config import ModelConfig

ROWS = (1, *SIZES)
# number of rows of the products that others are compared with bit by bit
COMPARED = 16


def matrices(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """Shapes [out, in] of the matrices of a layer, by name."""
    return {
        "qkv": ((c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden),
        "out": (c.hidden, c.heads * c.head_dim),
        "gate_up": (2 * c.intermediate, c.hidden),
        "down": (c.hidden, c.intermediate),
    }


def run(section: Section) -> None:
    """Add one row per matrix and number of rows: microseconds, and share of copy bandwidth."""
    if not section.cuda:
        section.skip("products by rows: cuBLAS needs a GPU")
        return
    section.facts["copy bytes/s"] = bandwidth = copy_bandwidth(section.device)
    for name, config in shapes(section).items():
        for product, (n, k) in matrices(config).items():
            weights = weights_of(n, k, section.device)
            whole = torch.randn(max(ROWS), k, device=section.device).to(torch.bfloat16)
            first = F.linear(whole[:COMPARED], weights[0])[0]
            for rows in ROWS:
                if section.left <= 0:
                    section.cut_off(f"{product} of {name} from {rows} rows on")
                    break
                x = whole[:rows]
                us = replayed([lambda w=w, x=x: F.linear(x, w) for w in weights], 10)[0]
                section.add(
                    shape=name,
                    product=product,
                    rows=rows,
                    us=us,
                    share_of_copy=moved(x, weights[0]) / (us * 1e-6) / bandwidth,
                    same_bits=bool((F.linear(x, weights[0])[0] == first).all()),
                )


def weights_of(n: int, k: int, device: torch.device) -> list[torch.Tensor]:
    """Random matrices of a product that together exceed the cache."""
    return [
        torch.randn(n, k, device=device).to(torch.bfloat16) for _ in range(copies_for(2 * n * k))
    ]


def moved(x: torch.Tensor, weight: torch.Tensor) -> int:
    """Bytes of a product's operands."""
    return sum(t.numel() * t.element_size() for t in (x, weight))
