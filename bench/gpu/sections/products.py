"""Time of cuBLAS by the number of rows, for the products of a layer, which sets the cost of drafts.

Each row also has whether results equal those among 16 rows bit by bit: if not, bfloat16 tokens may
depend on the drafts.
"""

import torch
import torch.nn.functional as F

from bench.gpu.lib.section import Section
from bench.gpu.lib.workload import matrices, moved, shapes, weights_of
from bench.micro.timing import copy_bandwidth, replayed
from csd.engine.step.static_step import SIZES

ROWS = (1, *SIZES)
# number of rows of the products that others are compared with bit by bit
COMPARED = 16


def run(section: Section) -> None:
    """Add one row per matrix and number of rows: microseconds, and share of copy bandwidth."""
    if not section.cuda:
        section.skip("products by rows: cuBLAS needs a GPU")
        return
    section.facts["copy bytes/s"] = bandwidth = copy_bandwidth(section.device)
    for name, config in shapes(section).items():
        for product, (n, k) in matrices(config).items():
            weights = weights_of(n, k, section.device, section.dtype)
            whole = torch.randn(max(ROWS), k, device=section.device).to(section.dtype)
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
