"""cuBLAS by the number of rows, for the products of a layer: what drafts cost rests on it.

Beside the time, whether a row has the same bits as among 16 rows: where it has not, tokens of
bfloat16 may differ with what is drafted.
"""

import torch
import torch.nn.functional as F

from bench.gpu.section import Section
from bench.gpu.workload import shapes
from bench.micro.timing import copies_for, copy_bandwidth, replayed
from csd.engine.static_step import SIZES
from csd.models.config import ModelConfig

ROWS = (1, *SIZES)
# among which a row's bits are those that others are compared with
COMPARED = 16


def matrices(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """[out, in] of the products of a layer."""
    return {
        "qkv": ((c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden),
        "out": (c.hidden, c.heads * c.head_dim),
        "gate_up": (2 * c.intermediate, c.hidden),
        "down": (c.hidden, c.intermediate),
    }


def run(section: Section) -> None:
    """A row a matrix and number of rows: microseconds, and the share of the copy bandwidth."""
    if not section.cuda:
        section.skip("products by rows: cuBLAS needs a GPU")
        return
    section.facts["copy bytes/s"] = bandwidth = copy_bandwidth(section.device)
    for name, config in shapes(section).items():
        for product, (n, k) in matrices(config).items():
            weights = weights_of(n, k, section.device)
            most = torch.randn(max(ROWS), k, device=section.device).to(torch.bfloat16)
            first = F.linear(most[:COMPARED], weights[0])[0]
            for rows in ROWS:
                if section.left <= 0:
                    section.cut_off(f"{product} of {name} from {rows} rows on")
                    break
                x = most[:rows]
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
    """Matrices of a product that do not fit into the cache together."""
    return [
        torch.randn(n, k, device=device).to(torch.bfloat16) for _ in range(copies_for(2 * n * k))
    ]


def moved(x: torch.Tensor, weight: torch.Tensor) -> int:
    """Bytes that a product reads."""
    return sum(t.numel() * t.element_size() for t in (x, weight))
