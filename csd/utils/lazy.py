"""Lazy import of modules, and checks for missing and for conflicting packages."""

import json
import shlex
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from itertools import chain
from types import ModuleType
from urllib.parse import unquote


def submodules(package: str) -> Callable[[str], ModuleType]:
    """`__getattr__` of a package that imports each of its modules at the first access."""

    def find(name: str) -> ModuleType:
        # a name such as __path__ is looked up while the package itself is imported
        if name.startswith("_") or find_spec(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f"{package}.{name}")

    return find


# name of this distribution; no index has it yet, so hints name the packages of an extra
DISTRIBUTION = "csd-llm"


def packages_of(extra: str, requirements: Iterable[str]) -> list[str]:
    """Requirements of an extra among those of this distribution, as pip takes them.

    requirements: of the metadata, such as "trl>=1.16; extra == 'trl'". Extras that an extra names
    are replaced by their packages.
    """
    from packaging.requirements import Requirement

    packages: list[str] = []
    for needed in map(Requirement, requirements):
        marker, needed.marker = needed.marker, None
        # without a marker, or true for no extra: csd needs it anyway
        if marker is None or marker.evaluate({"extra": ""}):
            continue
        if marker.evaluate({"extra": extra}):
            own = needed.name == DISTRIBUTION
            parts = [packages_of(part, requirements) for part in sorted(needed.extras)]
            packages += chain(*parts) if own else [str(needed)]
    return list(dict.fromkeys(packages))


def pip_install(*extras: str) -> str:
    """The command that installs the packages of `extras`, by this installation's metadata."""
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        requirements = []
    packages = [packages_of(extra, requirements) for extra in extras]
    if not all(packages):
        # sources that were never installed, or an older installation
        wanted = ",".join(extras)
        return f"pip install -e '.[{wanted}]' (in a clone of csd)"
    return shlex.join(["pip", "install", *dict.fromkeys(chain(*packages))])


def check_installed(module: str, extra: str, what: str) -> None:
    """Raises ImportError, naming the packages of an extra of csd, if a module is missing.

    what: name of the part that needs the module, for the message.
    """
    if find_spec(module) is None:
        raise ImportError(f"{what} needs {module}: {pip_install(extra)}")


def source_of(distribution: metadata.Distribution) -> str:
    """Arguments with which pip installs a distribution again from where it came."""
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    url = direct.get("url", distribution.name)
    if "vcs_info" in direct:
        return shlex.quote(f"{direct['vcs_info']['vcs']}+{url}@{direct['vcs_info']['commit_id']}")
    is_editable = direct.get("dir_info", {}).get("editable", False)
    return "-e " * is_editable + shlex.quote(unquote(url.removeprefix("file://")))


@cache
def warn_of_namesake() -> None:
    """Warn, once, if PyPI's csd is installed, which writes to the same folder as csd-llm.

    An older installation of this package under that name has this package's command.
    """
    for other in metadata.distributions(name="csd"):
        if all(entry.value != "csd.cli.main:main" for entry in other.entry_points):
            own = next(iter(metadata.distributions(name=DISTRIBUTION)), None)
            again = "-e . (in a clone of csd)" if own is None else source_of(own)
            warnings.warn(
                f"the distribution csd {other.version} ({other.metadata['Summary']}) is another "
                "project, and its files replace some of csd-llm's: run `pip uninstall csd`, then "
                f"`pip install --force-reinstall --no-deps {again}`",
                stacklevel=2,
            )
            return
