"""Notice of another distribution whose package is named csd too."""

import warnings
from functools import cache
from importlib import metadata


@cache
def warn_of_namesake() -> None:
    """Warn, once, if PyPI's csd is installed, which writes to the same folder as csd-llm.

    An older installation of this package under that name has this package's command.
    """
    for other in metadata.distributions(name="csd"):
        if all(entry.value != "csd.cli.main:main" for entry in other.entry_points):
            warnings.warn(
                f"the distribution csd {other.version} ({other.metadata['Summary']}) is another "
                "project, and its files replace some of csd-llm's: run `pip uninstall csd`, then "
                "`pip install --force-reinstall --no-deps csd-llm`",
                stacklevel=2,
            )
            return
