"""Time of matrix products with exact rows, compared to cuBLAS, by the number of rows.

"gate_up, SwiGLU" is one Triton launch, compared to cuBLAS and a launch of SwiGLU. Engines without
exact=True use the latter.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from bench.gpu.lib.section import Section
from bench.gpu.lib.workload import matrices, moved, shapes, weights_of
from bench.micro.timing import copy_bandwidth, replayed
from csd.engine.step.static_step import SIZES
from csd.kernels.layers.gated_linear import gated_linear_triton
from csd.kernels.layers.row_linear import row_linear_triton
from csd.kernels.layers.swiglu import swiglu_triton
from csd.models.exact_products import CUBLAS_ROWS, RowBlocks, in_blocks


def cublas_in_blocks(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return in_blocks(F.linear, RowBlocks(CUBLAS_ROWS, CUBLAS_ROWS), x, weight, None)


PROVIDERS = {"triton": row_linear_triton, "cublas 64": cublas_in_blocks, "cublas": F.linear}
GATED = {
    "triton": gated_linear_triton,
    "cublas 64": lambda x, weight: swiglu_triton(cublas_in_blocks(x, weight)),
    "cublas": lambda x, weight: swiglu_triton(F.linear(x, weight)),
}


def price(section: Section) -> None:
    """Add one row per matrix and number of rows: microseconds, and share of copy bandwidth."""
    bandwidth = copy_bandwidth(section.device)
    for name, config in shapes(section).items():
        for product, (n, k) in matrices(config).items():
            weights = weights_of(n, k, section.device, section.dtype)
            for rows in SIZES:
                if section.left <= 0:
                    section.cut_off(f"prices of {product} of {name} from {rows} rows on")
                    break
                x = torch.randn(rows, k, device=section.device).to(section.dtype)
                of = {product: PROVIDERS}
                if product == "gate_up":
                    of["gate_up, SwiGLU"] = GATED
                for label, providers in of.items():
                    row = times(providers, x, weights, bandwidth)
                    section.add(shape=name, product=label, rows=rows, **row)


def times(
    providers: dict[str, Callable], x: torch.Tensor, weights: list[torch.Tensor], bandwidth: float
) -> dict:
    """Timed rows of each provider, over weights that together exceed the cache."""
    row: dict = {}
    read = moved(x, weights[0])
    for name, run in providers.items():
        us = replayed([lambda w=w, run=run: run(x, w) for w in weights], 10)[0]
        row |= {f"{name} us": us, f"{name} share of copy": read / (us * 1e-6) / bandwidth}
    return row | {"triton over cublas": row["triton us"] / row["cublas us"]}
