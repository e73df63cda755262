"""The `csd` command."""

from argparse import _SubParsersAction
from collections.abc import Callable

# functions that add a subcommand, from packages above this one
COMMANDS: list[Callable[[_SubParsersAction], None]] = []
