"""The bound of a float result: the error of an eager run of the same dtype, against float64."""

import torch


def within_eager(got, eager, exact, length: int, dtype: torch.dtype | None = None) -> None:
    """The largest error of `got` is at most twice that of `eager` and a rounding of a sum.

    exact: the same in float64. length: numbers in the longest sum behind a value; n roundings of
    random sign add up to sqrt(n) of them (Higham and Mary, "A new approach to probabilistic
    rounding error analysis", 2019), so an order of summation may be that much worse than the
    eager run's, whatever CPU chose it. dtype: of the arithmetic, where it is not that of `got`.
    """
    assert got.shape == eager.shape == exact.shape and exact.dtype == torch.float64
    assert dtype or got.dtype == eager.dtype
    eps = torch.finfo(dtype or got.dtype).eps
    error, theirs = ((x.double() - exact).abs().max() for x in (got, eager))
    limit = 2 * theirs + eps * length**0.5 * exact.abs().max()
    assert error <= limit, f"error {error:.2e}, eager {theirs:.2e}, limit {limit:.2e}"


def gradient_within_eager(
    got, eager: list, exact, length: int, dtype: torch.dtype | None = None
) -> None:
    """The error of a gradient, as a norm, is bounded like that of `within_eager`.

    The largest error of a gradient is that of its few worst-conditioned numbers, in which
    transformers' own attentions differ more than twofold. eager: the gradient of each of them.
    """
    eps = torch.finfo(dtype or got.dtype).eps
    error, *theirs = ((x.double() - exact).norm() for x in (got, *eager))
    limit = 2 * max(theirs) + eps * length**0.5 * exact.norm()
    assert error <= limit, f"error {error:.2e}, eager {max(theirs):.2e}, limit {limit:.2e}"
