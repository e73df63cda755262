"""Marks of tests that `make test` leaves to targets of their own."""

from collections import defaultdict
from zlib import crc32

import pytest

# `make test-slow` runs the marked tests
slow = pytest.mark.slow
# of a test's cases `make test` runs so many, any of them, and `make test-slow` the others
few = pytest.mark.few


def mark_beyond_few(items: list[pytest.Item]) -> None:
    """Mark slow the cases that `few` leaves out, the same ones in each run."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases[item.path, item.originalname].append(item)
    for of_test in cases.values():
        (kept,) = of_test[0].get_closest_marker("few").args
        of_test.sort(key=lambda item: crc32(item.name.encode()))
        for item in of_test[kept:]:
            item.add_marker(slow)
