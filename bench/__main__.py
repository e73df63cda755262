"""The benchmarks by name: `python -m bench` lists them, `python -m bench NAME ...` runs one.

`pytest bench/micro --benchmark-only` times the kernels alone with pytest-benchmark.
"""

import ast
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = {
    "e2e": "whole runs on a CPU",
    "micro": "single operations",
    "gpu": "on a GPU, or for one",
    "studies": "questions, answered by replay or by runs",
    "lib": "what the others start from",
}


def commands() -> dict[str, Path]:
    """Returns the files that are commands, by name, ordered by folder of FLOORS."""
    files: dict[str, Path] = {}
    for floor in FLOORS:
        for path in sorted((ROOT / "bench" / floor).rglob("*.py")):
            if 'if __name__ == "__main__":' in path.read_text() and _documented(path):
                name = path.parent.name if path.stem == "__main__" else path.stem
                if name in files:
                    raise RuntimeError(f"two benchmarks are named {name}: {files[name]}, {path}")
                files[name] = path
    return files


def _documented(path: Path) -> bool:
    """True if the file's docstring has its usage; scripts that only benchmarks start have none."""
    return "python -m bench" in (ast.get_docstring(ast.parse(path.read_text())) or "")


def index() -> str:
    """Returns the index of commands, one line per command, by folder."""
    files, lines = commands(), []
    for floor, title in FLOORS.items():
        names = [n for n, p in files.items() if p.relative_to(ROOT / "bench").parts[0] == floor]
        lines += [f"\n{floor}: {title}"] if names else []
        for name in names:
            text = ast.get_docstring(ast.parse(files[name].read_text())) or ""
            lines.append(f"  {name:14} {text.splitlines()[0]}")
    return "\n".join([*lines, "\npytest bench/micro --benchmark-only times the operations."])


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__.splitlines()[0], index(), sep="\n")
        return 0
    files = commands()
    if argv[0] not in files:
        print(f"NAME must be one of {', '.join(files)}; got {argv[0]}", file=sys.stderr)
        return 2
    module = ".".join(files[argv[0]].relative_to(ROOT).with_suffix("").parts)
    sys.argv = [f"python -m bench {argv[0]}", *argv[1:]]
    runpy.run_module(module.removesuffix(".__main__"), run_name="__main__")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
