"""Flags that are not arguments of `csd.generate`."""

from argparse import Namespace
from collections.abc import Iterable

from csd.utils.arguments import check_whole


def check_counts(args: Namespace, names: Iterable[str]) -> None:
    """Raises ValueError, naming the flag, if a count is below 1; None is allowed."""
    for name in names:
        if getattr(args, name) is not None:
            check_whole(name, getattr(args, name), 1)
