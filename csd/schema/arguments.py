"""Checks of arguments that several functions take; each names the argument."""

import math
from typing import Any


def check_whole(name: str, value: Any, low: int) -> int:
    """Raises TypeError or ValueError unless a whole number, at least `low`."""
    _check_integer(name, value, "a whole number")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    return value


def check_seed(value: Any) -> int:
    """Raises TypeError unless a whole number, which may be negative."""
    return _check_integer("seed", value, "a whole number or None")


def check_budget(value: Any) -> str | int:
    """Raises TypeError or ValueError unless "auto" or a whole number from 0."""
    if value == "auto":
        return "auto"
    return check_whole("budget", _check_integer("budget", value, "'auto' or a whole number"), 0)


def check_share(value: Any) -> str | None:
    """Raises ValueError unless None or "call"."""
    if value not in (None, "call"):
        raise ValueError(f"share must be None or 'call', got {value!r}")
    return value


def check_number(
    name: str, value: Any, low: float, high: float = math.inf, above: bool = False
) -> float:
    """Raises TypeError or ValueError unless a finite number in [low, high]; above: (low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    inside = low < value <= high if above else low <= value <= high
    if not inside or math.isinf(value):
        bracket = "(" if above else "["
        end = f"{high}]" if high < math.inf else "inf)"
        raise ValueError(f"{name} must lie in {bracket}{low}, {end}, got {value}")
    return value


def _check_integer(name: str, value: Any, expected: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be {expected}, got {value!r}")
    return value
