"""Run the tests that compare floats as other processors would: other kernels, other sums.

    python -m bench.instruction_sets [--files tests/models/test_pack.py ...] [--json F]

A line for each test file that bounds floats by arithmetic, in which a count of tests that passed
stands for each setting of oneDNN's and ATen's instruction sets and of threads. A result file that
exists is completed: what it holds of other files stays.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from bench.common import finish, table

ROOT = Path(__file__).parents[1]
# a processor offers a setting only what it has, so these are steps down from `default`
SETTINGS = {
    "as it is": {},
    "oneDNN AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "oneDNN AVX512_CORE": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "ATen avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "ATen default": {"ATEN_CPU_CAPABILITY": "default"},
    "two threads": {"OMP_NUM_THREADS": "2"},
}
# what a test that compares floats calls, itself or by a helper
COMPARES = re.compile(r"\b(within_eager|assert_close|allclose|equal_fields|dense)\b")


def files() -> list[str]:
    """Test files that compare floats, but for those of benchmarks and of integrations."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    names = [p.relative_to(ROOT).as_posix() for p in found if COMPARES.search(p.read_text())]
    return [n for n in names if not n.startswith(("tests/bench/", "tests/faults/"))]


def run(name: str, setting: dict[str, str]) -> str:
    """What pytest says of a file: "12" where 12 passed, "11 of 12" where one failed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | setting
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "--benchmark-disable", name],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (\w+)", lines[-1] if lines else "")}
    passed = counts.get("passed", 0)
    failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    if not passed + failed and done.returncode != 5:
        raise RuntimeError(f"pytest ran no test of {name}:\n{done.stdout}{done.stderr}")
    if failed:
        print(done.stdout, file=sys.stderr)
    return f"{passed} of {passed + failed}" if failed else str(passed)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", nargs="+", default=files())
    parser.add_argument("--settings", nargs="+", default=[*SETTINGS], choices=SETTINGS)
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    kept: dict[str, dict] = {}
    if args.json and Path(args.json).exists():
        kept = {row["file"]: row for row in json.loads(Path(args.json).read_text())["rows"]}
    for name in args.files:
        row = kept.setdefault(name, {"file": name})
        for setting in args.settings:
            row[setting] = run(name, SETTINGS[setting])
    rows = [kept[name] for name in sorted(kept)]
    print(table([{"file": r["file"], **{s: r.get(s, "") for s in SETTINGS}} for r in rows]))
    finish({"bench": "instruction_sets", "settings": SETTINGS, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
