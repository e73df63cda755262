"""One argument: its default, check, flag and description."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Option:
    """One argument. Its flags are "--" plus its name with hyphens, and `short`."""

    default: Any
    help: str
    # maps a value to the one to use, or to None if it is used unchanged; raises TypeError or
    # ValueError naming the argument
    check: Callable[[Any], Any] | None = None
    # parser on the command line: a function of the text, bool, or list for a repeatable flag
    flag: Callable[[str], Any] | None = None
    short: str | None = None
