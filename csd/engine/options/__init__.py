"""The arguments of `csd.generate`, each defined once.

`Options` is the static type of the keyword arguments, and the `Option` next to each type holds its
default, its check, its command-line flag and its description (`arguments.py`). Derived from them
are the checks of a call (`read_options`), the signatures that editors show and the list in
`help(csd.generate)` (`show.shows`), and the flags of the `csd` command (`show.add_flags`).
"""

from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from csd.engine.options.arguments import (
    DraftingOptions,
    EndOptions,
    LoadingOptions,
    Option,
    ResultOptions,
    SamplingOptions,
)
from csd.utils.other_names import unknown_argument


class Options(SamplingOptions, EndOptions, DraftingOptions, ResultOptions, total=False):
    """The keyword arguments of `Engine.generate` and `Engine.stream`."""


class GenerateOptions(Options, LoadingOptions, total=False):
    """The keyword arguments of `csd.generate` and `csd.stream`, which also load the model."""


def options_of(kind: type) -> dict[str, tuple[Any, Option]]:
    """Type and `Option` of each argument in `kind`, in the order of their definition."""
    hints = get_type_hints(kind, include_extras=True)
    order = dict.fromkeys(name for base in (Options, kind) for name in base.__annotations__)
    return {name: get_args(hints[name])[:2] for name in order}


def read_options(given: Mapping[str, Any], kind: type = Options) -> dict[str, Any]:
    """Returns all arguments in `kind`, checked; missing arguments get their defaults.

    Raises TypeError for an unknown argument.
    """
    known_options = options_of(kind)
    for name in given:
        if name not in known_options:
            raise unknown_argument(name, known_options)
    found = {}
    for name, (_, option) in known_options.items():
        found[name] = given.get(name, option.default)
        if option.check is not None and (checked := option.check(found[name])) is not None:
            found[name] = checked
    return found
