"""Lazy import of modules, and checks for missing optional packages."""

from collections.abc import Callable
from importlib import import_module
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
