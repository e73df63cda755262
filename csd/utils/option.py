"""Declarations of arguments: everything that signatures, flags, servers and checks derive."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_type_hints


@dataclass(frozen=True, slots=True)
class Option:
    """One argument, beside its type. Its flags are "--" plus its name with hyphens, and `short`."""

    default: Any
    help: str
    # maps (name in errors, value) to the value to use; raises TypeError or ValueError
    check: Callable[[str, Any], Any] | None = None
    # parser on the command line: a function of the text, bool, or list for a repeatable flag
    flag: Callable[[str], Any] | None = None
    short: str | None = None
    # value without one of the call or the generation config, which turns a filter or a rule off;
    # by default `default`
    off: Any = ...
    # name in transformers' generation config, whose value applies where the call has none
    config: str | None = None
    # transformers' processor and its attribute with the value: "TopPLogitsWarper.top_p"
    processor: str = ""
    # names in a request of `csd serve`, separated by spaces
    fields: str = ""

    def __post_init__(self) -> None:
        if self.off is ...:
            object.__setattr__(self, "off", self.default)


@cache
def options_of(kind: type) -> dict[str, tuple[Any, Option]]:
    """Type and `Option` of each argument of a TypedDict, in the order of their definition."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: get_args(hints[name])[:2] for name in kind.__annotations__}


def checked(kind: type, name: str, value: Any, where: str = "") -> Any:
    """Value to use for an argument of `kind`. None is served if the argument's type has it.

    where: text after the name in an error message. Raises TypeError or ValueError.
    """
    hint, option = options_of(kind)[name]
    if option.check is None or (value is None and type(None) in get_args(hint)):
        return value
    return option.check(name + where, value)
