"""One argument: its default, check, flag and description."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Option:
    """One argument. The names of its flag are "--" and its own with hyphens, and `short`."""

    default: Any
    help: str
    # gets the value and returns the one to use, None for as it is; raises TypeError or ValueError
    # naming the argument
    check: Callable[[Any], Any] | None = None
    # how the command line reads it: a function of the text, bool, or list for a repeatable flag
    flag: Callable[[str], Any] | None = None
    short: str | None = None
