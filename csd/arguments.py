"""Checks of arguments that several entries take. Each returns its value as it is."""

from typing import Any


def whole(name: str, value: Any, low: int) -> int:
    """Raises TypeError or ValueError unless a whole number, at least `low`."""
    _integer(name, value, "a whole number")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    return value


def seed(value: Any) -> int:
    """Raises TypeError unless a whole number, which may be negative."""
    return _integer("seed", value, "a whole number or None")


def budget(value: Any) -> str | int:
    """Raises TypeError or ValueError unless "auto" or a whole number from 0."""
    if value == "auto":
        return "auto"
    return whole("budget", _integer("budget", value, "'auto' or a whole number"), 0)


def _integer(name: str, value: Any, expected: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be {expected}, got {value!r}")
    return value
