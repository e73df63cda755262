"""Comparison of an operation's results with those of its reference.

    |x - exact| <= r eps max(m, least) + 2 max over its row of |eager - exact|

m is the largest |exact| of the result: another order of summation changes an element by roundings
of its terms, even if the terms cancel to nearly 0.

eager is the reference in the dtype, exact the reference in float64, eps that of the result's dtype.
A row is one index of the first dimension; a vector is one row. least is 1 for log-probabilities,
whose error is that of sums of about 1, of which they are the logarithms, else 0.
"""

from collections.abc import Callable

import torch

from csd.engine.self_check.report import Check

# r: a 16-bit result is the rounding of a float32 sum. A float32 result is summed in its own dtype,
# and a sum of 1,024 terms is off by sqrt(1024) / 2 roundings if their signs are random
ROUNDINGS, ROUNDINGS_32 = 4, 16
# integer dtype with as many bytes as a float
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare(
    row: Check,
    got: list[torch.Tensor],
    eager: list[torch.Tensor],
    exact: Callable[[], list[torch.Tensor]],
    least: float = 0.0,
) -> None:
    """Record in `row` if `got` is wrong. exact: called only if bits of `got` and `eager` differ.

    An integer must equal that of either reference: if these differ, it depends on rounding.
    """
    if len(got) != len(eager):
        row.fail(f"{len(got)} tensors instead of {len(eager)}")
        return
    wide: list[torch.Tensor] | None = None
    for i, (a, b) in enumerate(zip(got, eager, strict=True)):
        a = a.detach().cpu()
        if a.shape != b.shape or a.dtype != b.dtype:
            row.fail(f"{_kind(a)} instead of {_kind(b)}")
        elif not _same_bits(a, b):
            wide = exact() if wide is None else wide
            if b.is_floating_point():
                _compare_floats(row, a, b, wide[i], least)
            else:
                _compare_integers(row, a, b, wide[i])
        if row.error:
            return


def _kind(x: torch.Tensor) -> str:
    return f"shape {tuple(x.shape)} of {x.dtype}"


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    bits = BITS[a.element_size()]
    return torch.equal(a.view(bits), b.view(bits))


def _compare_integers(
    row: Check, got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor
) -> None:
    wrong = int(((got != eager) & (got != exact)).sum())
    if wrong:
        row.fail(f"{wrong} of {got.numel()} integers differ")


def _compare_floats(
    row: Check, got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, least: float
) -> None:
    # uninitialized memory may hold anything, but holds the same on both sides
    unwritten = ((got == eager) | (got.isnan() & eager.isnan())) & ~exact.isfinite()
    a, b, wide = (x.double().masked_fill(unwritten, 0) for x in (got, eager, exact))
    ours, theirs = ((x - wide).abs() for x in (a, b))
    lines = (wide.shape[0], -1) if wide.dim() > 1 else (1, -1)
    most = 2 * theirs.reshape(lines).amax(1, keepdim=True)
    size = wide.abs().max().clamp(min=least) if wide.numel() else 0.0
    roundings = ROUNDINGS if got.element_size() == 2 else ROUNDINGS_32
    most = most + roundings * torch.finfo(got.dtype).eps * size
    # an error of 0 is allowed even if the bound is 0
    share = torch.where(ours == 0, 0.0, ours).reshape(lines) / most.clamp(min=1e-300)
    share = share.nan_to_num(nan=torch.inf)
    at = int(share.argmax())
    worst = float(share.view(-1)[at])
    row.worst = max(row.worst, worst)
    if worst > 1:
        values = float(ours.reshape(-1)[at]), float(most.expand_as(share).reshape(-1)[at])
        row.fail("error {:.2e}, allowed are {:.2e}".format(*values))
