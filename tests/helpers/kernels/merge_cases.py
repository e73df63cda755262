"""Partials of attention to merge."""

import torch


def merge_case(each, K=2, D=24, stride=40):
    """Rows with partials of both parts, of one, of none; all other memory is NaN."""
    g = torch.Generator().manual_seed(each)
    merge = torch.tensor([[3, 2, 200, 1], [0, 0, 220, 3], [11, 1, 0, 0], [0, 0, 0, 0]])
    o, lse = torch.full((K, 400, D), float("nan")), torch.full((K, 400), float("nan"))
    for first, splits in merge.view(-1, 2).tolist():
        for i in range(splits):
            rows = slice(first + i * stride, first + i * stride + each)
            o[:, rows] = torch.randn(K, each, D, generator=g)
            lse[:, rows] = 30 * torch.randn(K, each, generator=g)
    # a partial that saw no key, and values so far apart that a weight underflows
    lse[:, 220], o[:, 220] = float("-inf"), 0
    lse[:, 3] = 3000
    out = torch.full((4, K * each, D), float("nan"))
    return dict(o=o, lse=lse, merge=merge.int(), stride=stride, out=out)
