"""Marks of tests that `make test` leaves to targets of their own."""

from collections import defaultdict
from itertools import combinations
from zlib import crc32

import pytest

# `make test-slow` runs the marked tests
slow = pytest.mark.slow
# of a test's cases `make test` runs so many, of different values, and `make test-slow` the others
few = pytest.mark.few
# `make test` runs as many as have each value of each parameter, and with `pairs` each pair of
# values of two parameters; `make test-slow` the others
values, pairs = pytest.mark.cover(1), pytest.mark.cover(2)


def mark_left_out(items: list[pytest.Item]) -> None:
    """Mark slow the cases that `few`, `values` and `pairs` leave out, the same ones in each run."""
    cases = defaultdict(list)
    for item in items:
        if not any(map(item.get_closest_marker, ("slow", "skip"))):
            cases[item.path, item.originalname].append(item)
    for of_test in cases.values():
        # an order that has nothing to do with that of the parameters
        of_test.sort(key=lambda item: crc32(item.name.encode()))
        number, cover = map(of_test[0].get_closest_marker, ("few", "cover"))
        if number is None and cover is None:
            continue
        specs = [getattr(item, "callspec", None) for item in of_test]
        # a value is one object in all cases
        rows = [[*map(id, spec.params.values())] if spec else [0] for spec in specs]
        kept = covering(rows, cover.args[0] if cover else 1)
        if number:
            # those that add values, then any
            kept = [*dict.fromkeys([*kept, *range(len(rows))])][: number.args[0]]
        for i, item in enumerate(of_test):
            if i not in kept:
                item.add_marker(slow)


def third_of(items: list[pytest.Item], third: int) -> list[pytest.Item]:
    """The items of a third of all files; third: 0, 1 or 2."""
    return [item for item in items if crc32(item.path.name.encode()) % 3 == third]


def covering(rows: list[list[int]], strength: int) -> list[int]:
    """Indices of rows in which each combination of the values of `strength` columns that any row
    has occurs; each is the first of those that add the most combinations."""
    # columns that are equal are names of one parameter
    rows = [*zip(*dict.fromkeys(zip(*rows, strict=True)), strict=True)]
    left = [{*combinations(enumerate(row), min(strength, len(row)))} for row in rows]
    kept = []
    while any(left):
        best = max(range(len(left)), key=lambda i: len(left[i]))
        kept.append(best)
        left = [each - left[best] for each in left]
    return kept
