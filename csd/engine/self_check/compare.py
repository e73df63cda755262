"""Comparison of results with a reference's.

    |x - exact| <= r eps max(m, least) + 2 max over its row of |eager - exact|

m is the largest |exact| of the result: an order of sums moves an element by roundings of its terms,
however near 0 they cancel.

eager is the reference in the dtype, exact the reference in float64, eps that of the result's dtype.
A row is what one index of the first dimension holds; a vector is one row. least is 1 of
log-probabilities, which are as exact as the sums of about 1 whose logarithms they are, else 0.
"""

from collections.abc import Callable

import torch

from csd.engine.self_check.report import Check

# r: 16 bits round a sum that was taken in float32. In float32 the sum has the result's own dtype,
# and one of 1,024 terms is off by sqrt(1024) / 2 roundings where their signs are random
ROUNDINGS, ROUNDINGS_32 = 4, 16
# the integers that have a float's bits
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare(
    row: Check,
    got: list[torch.Tensor],
    eager: list[torch.Tensor],
    exact: Callable[[], list[torch.Tensor]],
    least: float = 0.0,
) -> None:
    """Record in `row` an error of `got`. exact: called if `got` has other bits than `eager`.

    Integers must be one of the references': where these differ, rounding decides.
    """
    if len(got) != len(eager):
        row.fail(f"{len(got)} tensors in place of {len(eager)}")
        return
    wide: list[torch.Tensor] | None = None
    for i, (a, b) in enumerate(zip(got, eager, strict=True)):
        a = a.detach().cpu()
        if a.shape != b.shape or a.dtype != b.dtype:
            row.fail(f"{_kind(a)} in place of {_kind(b)}")
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
    # memory that none has written yet may hold anything, and holds the same on both sides
    unwritten = ((got == eager) | (got.isnan() & eager.isnan())) & ~exact.isfinite()
    a, b, wide = (x.double().masked_fill(unwritten, 0) for x in (got, eager, exact))
    ours, theirs = ((x - wide).abs() for x in (a, b))
    lines = (wide.shape[0], -1) if wide.dim() > 1 else (1, -1)
    most = 2 * theirs.reshape(lines).amax(1, keepdim=True)
    size = wide.abs().max().clamp(min=least) if wide.numel() else 0.0
    roundings = ROUNDINGS if got.element_size() == 2 else ROUNDINGS_32
    most = most + roundings * torch.finfo(got.dtype).eps * size
    # where both are nothing, nothing is wrong
    share = torch.where(ours == 0, 0.0, ours).reshape(lines) / most.clamp(min=1e-300)
    share = share.nan_to_num(nan=torch.inf)
    at = int(share.argmax())
    worst = float(share.view(-1)[at])
    row.worst = max(row.worst, worst)
    if worst > 1:
        values = float(ours.reshape(-1)[at]), float(most.expand_as(share).reshape(-1)[at])
        row.fail("error {:.2e}, {:.2e} is allowed".format(*values))
