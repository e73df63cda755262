"""Rounding of a product's x to int8, as a definition.

A row is rounded in groups of GROUP numbers, each with a float32 scale:

    s = max |x| / 127,   q = round(x / s),   x ~ s q

Where one group's largest number is more than OUTLIER times the mean of the groups', the row gets
second digits, which leave 2^-16 of each group's largest number: x ~ s (q + r / DIGIT) with
r = round((x - s q) DIGIT / s). That is so at a prompt's first position, and follows from the row's
own numbers, so that its bits depend on nothing else.
"""

import torch

GROUP = 16
OUTLIER, DIGIT = 9.0, 254


def round_rows_ref(x: torch.Tensor) -> torch.Tensor:
    """x [M, K] float32 as a product with a quantised weight reads it, dequantised."""
    groups = x.unflatten(1, (-1, GROUP))
    top = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(top > 0, 127 / top, 0)
    scale = top * torch.tensor(1 / 127, dtype=x.dtype)
    first = (groups * inverse).round()
    # the difference is exact in float64 and rounded once, as by a fused multiply-add
    left = (groups.double() - first.double() * scale).to(x.dtype)
    second = (left * (inverse * DIGIT)).round() * (scale * torch.tensor(1 / DIGIT, dtype=x.dtype))
    has_outlier = top.amax(1, keepdim=True) * top.shape[1] > OUTLIER * top.sum(1, keepdim=True)
    return (first * scale + torch.where(has_outlier, second, 0)).flatten(1)
