"""Checks of arguments that several entries take."""

from typing import Any


def whole(name: str, value: Any, low: int) -> int:
    """`value` as it is. Raises TypeError or ValueError unless whole, at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    return value


def seed(value: Any) -> int:
    """`value` as it is. Raises TypeError unless a whole number, which may be negative."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"seed must be a whole number or None, got {value!r}")
    return value


def budget(value: Any) -> str | int:
    """`value` as it is. Raises TypeError or ValueError unless "auto" or a whole number from 0."""
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"budget must be 'auto' or a whole number, got {value!r}")
    return whole("budget", value, 0)
