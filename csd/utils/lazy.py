"""Lazy import of modules, and checks for missing and for conflicting packages."""

import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType


def submodules(package: str) -> Callable[[str], ModuleType]:
    """`__getattr__` of a package that imports each of its modules at the first access."""

    def find(name: str) -> ModuleType:
        # a name such as __path__ is looked up while the package itself is imported
        if name.startswith("_") or find_spec(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f"{package}.{name}")

    return find


def check_installed(module: str, extra: str, what: str) -> None:
    """Raises ImportError, naming the extra of csd that installs it, if a module is missing.

    what: name of the part that needs the module, for the message.
    """
    if find_spec(module) is None:
        raise ImportError(f"{what} needs {module}: pip install 'csd-llm[{extra}]'")


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
