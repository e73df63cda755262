"""Python processes that run this process's csd and import nothing from the working folder.

Else anyone who can write to that folder could plant a json.py or torch.py there. Such a process
imports csd from the same place as this one, and other modules from this process's `sys.path`
without the working folder.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# keep the interpreter's own folders, even if one is the working folder
CODE = """
import sys
sys.path[:] = [*dict.fromkeys([x for x in {path} if x not in {here} or x in sys.path] + sys.path)]
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
spec = PathFinder.find_spec("csd", [{root}])
sys.modules["csd"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["csd"])
from {module} import main
sys.exit(main(sys.argv[1:]))
"""


def command(module: str, arguments: list[str]) -> list[str]:
    """Command line of a process that calls `main(arguments)` of csd's `module`."""
    path = [x for x in sys.path if isinstance(x, str)]
    here = [x for x in path if _is_here(x)]
    code = CODE.format(path=ascii(path), here=ascii(here), root=ascii(str(ROOT)), module=module)
    flags = ["-P", *["-E"] * sys.flags.ignore_environment, *["-s"] * sys.flags.no_user_site]
    return [sys.executable, *flags, "-c", code, *arguments]


def environment() -> dict[str, str]:
    """This process's environment, without the working folder in PYTHONPATH."""
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = os.pathsep.join(x for x in path if not _is_here(x))
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return others | {"PYTHONPATH": folders} if folders else others


def _is_here(path: str) -> bool:
    try:
        # an empty entry is the working folder
        return not path or os.path.samefile(path, os.getcwd())
    except OSError:
        # one of the two does not exist
        return False
