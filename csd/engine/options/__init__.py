"""The arguments of `csd.generate`, each declared once.

`Options` is the static type of the keyword arguments, and the `csd.utils.arguments.Option` next to
each type holds its default, its check, its help, its flag, and its names in the generation config
and in requests (`arguments.py`, `csd/state/filters.py`; `engine_arguments.py` has those of engines
and of the server). Derived from them are the checks of a call
(`read_options`), a prompt's `SamplingParams`, the signatures that editors show and the list in
`help(csd.generate)` (`show.shows`), the flags of the `csd` command (`show.add_flags`), and the
fields of `csd serve` (`csd.serve.http.names`).
"""

from collections.abc import Collection, Mapping
from typing import Any

from csd.engine.options.arguments import (
    DraftingOptions,
    EndOptions,
    LoadingOptions,
    PromptOptions,
    ResultOptions,
    SampleOptions,
)
from csd.engine.options.logit_params import LogitOptions
from csd.state.filters import FILTERS, FilterOptions
from csd.utils.arguments import checked, options_of
from csd.utils.other_names import unknown_argument


class SamplingOptions(FilterOptions, LogitOptions, EndOptions, total=False):
    """The arguments that make a prompt's `SamplingParams`."""


class Options(
    SampleOptions, SamplingOptions, PromptOptions, DraftingOptions, ResultOptions, total=False
):
    """The keyword arguments of `Engine.generate` and `Engine.stream`."""


class GenerateOptions(Options, LoadingOptions, total=False):
    """The keyword arguments of `csd.generate` and `csd.stream`, which also load the model."""


SAMPLING = frozenset(options_of(SamplingOptions))


class ReadOptions(dict[str, Any]):
    """All arguments of a call by name, checked."""


def read_options(arguments: Mapping[str, Any], kind: type = Options) -> ReadOptions:
    """Returns all arguments of `kind`, checked; missing arguments get their defaults.

    Arguments that have been read are returned as they are. Raises TypeError for an unknown
    argument, and the errors of `checked`.
    """
    if isinstance(arguments, ReadOptions):
        return arguments
    known_options = options_of(kind)
    for name in arguments:
        if name not in known_options:
            raise unknown_argument(name, known_options)
    return ReadOptions(
        (name, checked(kind, name, arguments[name]) if name in arguments else option.default)
        for name, (_, option) in known_options.items()
    )


def read_without_config(arguments: Mapping[str, Any], names: Collection[str]) -> ReadOptions:
    """`read_options` of the arguments in `names`, in which a filter that is not given is off.

    Raises TypeError for an argument that is not in `names`.
    """
    for name in arguments:
        if name not in names:
            raise unknown_argument(name, names)
    values = {name: v for name, v in arguments.items() if v is not None or name not in FILTERS}
    return read_options(FILTERS | values)
