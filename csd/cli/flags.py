"""Flags that are no argument of `csd.generate`."""

from argparse import Namespace
from collections.abc import Iterable

from csd.schema.arguments import check_whole


def check_counts(args: Namespace, names: Iterable[str]) -> None:
    """Raises ValueError, naming the flag, for a count that is given and below 1."""
    for name in names:
        if getattr(args, name) is not None:
            check_whole(name, getattr(args, name), 1)
