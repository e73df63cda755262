"""Run the tests that compare floats as other processors would: other kernels, other sums.

    python -m tools.instruction_sets [--files tests/unit/models/fused/test_pack.py ...] [--json F]

A line for each test file that bounds floats by arithmetic, in which a count of tests that passed
stands for each setting of oneDNN's, ATen's and numba's instruction sets and of threads. A result
file that exists is completed: what it holds of other files and settings stays.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from bench.lib.common import finish, table

ROOT = Path(__file__).parents[1]
# a processor offers a setting only what it has, so these are steps down from `default`
SETTINGS = {
    "as it is": {},
    "oneDNN AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "oneDNN AVX512_CORE": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "ATen avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "ATen default": {"ATEN_CPU_CAPABILITY": "default"},
    "numba AVX2": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+bmi2"},
    "two threads": {"OMP_NUM_THREADS": "2"},
}
# functions that a test that compares floats calls, itself or by a helper
COMPARES = re.compile(r"\b(within_eager|assert_close|allclose|equal_fields|dense)\b")


def files() -> list[str]:
    """Test files that compare floats, but for those of benchmarks and of integrations."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    names = [p.relative_to(ROOT).as_posix() for p in paths if COMPARES.search(p.read_text())]
    return [n for n in names if not n.startswith(("tests/bench/", "tests/robustness/faults/"))]


def run(names: list[str], setting: dict[str, str]) -> dict[str, str]:
    """Test results of each file: "12" where 12 passed, "11 of 12" where one failed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | setting
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "--benchmark-disable",
                f"--junitxml={report}",
                *names,
            ],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode not in (0, 1):
            raise RuntimeError(f"pytest did not run the tests:\n{done.stdout}{done.stderr}")
        cases = ElementTree.parse(report).getroot().iter("testcase")
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    counts = {name: [0, 0] for name in names}
    for case in cases:
        if case.find("skipped") is None:
            name = case.get("classname", "").replace(".", "/") + ".py"
            counts[name][0] += case.find("failure") is None and case.find("error") is None
            counts[name][1] += 1
    return {n: str(ok) if ok == all_ else f"{ok} of {all_}" for n, (ok, all_) in counts.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", nargs="+", default=files())
    parser.add_argument("--settings", nargs="+", default=[*SETTINGS], choices=SETTINGS)
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    rows: dict[str, dict] = {}
    if args.json and Path(args.json).exists():
        rows = {row["file"]: row for row in json.loads(Path(args.json).read_text())["rows"]}
    for setting in args.settings:
        for name, outcome in run(args.files, SETTINGS[setting]).items():
            rows.setdefault(name, {"file": name})[setting] = outcome
    ordered = [rows[name] for name in sorted(rows)]
    print(table([{"file": r["file"], **{s: r.get(s, "") for s in SETTINGS}} for r in ordered]))
    finish({"bench": "instruction_sets", "settings": SETTINGS, "rows": ordered}, args.json)


if __name__ == "__main__":
    main()
