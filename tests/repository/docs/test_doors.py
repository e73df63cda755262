"""Names of the documentation exist after `import csd`, and installed as users install it."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers.targets import slow

from bench.micro.test_operations import BACKENDS
from csd.utils.lazy import pip_install

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def names_in(page):
    """Dotted names of csd in a page, but for the places that mkdocs reads."""
    text = re.sub(r"^::: .*$", "", page.read_text(), flags=re.MULTILINE)
    return set(re.findall(r"(?<!['\"])\bcsd(?:\.[A-Za-z_]\w*)+", text))


NAMED = sorted(set().union(*map(names_in, PAGES)))


def lines_of(code, *arguments):
    """Output of a new process."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# new modules after `import csd`
LOADED = """
import sys
before = set(sys.modules)
import csd
heavy = ("triton", "numba", "transformers", "bench", "starlette", "latex2sympy2_extended", "sympy")
parts = ["csd.research.", "csd.gradient", "csd.kernels.draft.paper"]
parts += [f"csd.integrations.{m}" for m in ("trl", "ray", "vllm", "lm_eval")]
new = set(sys.modules) - before
print(sorted(n for n in new if n.partition(".")[0] in heavy or n.startswith(tuple(parts))))
"""
RESOLVE = """
from csd.utils.lazy import pip_install
extras = {"trl", "ray", "lm-eval", "gguf", "cpu", "report"}
for name in sys.argv[1:]:
    found, path = csd, "csd"
    try:
        for part in name.split(".")[1:]:
            path += "." + part
            # `csd.kernels.verify` is a function, and the name of a folder
            known = hasattr(found, part) or path not in sys.modules
            found = getattr(found, part) if known else sys.modules[path]
    except ImportError as error:
        assert any(pip_install(extra) in str(error) for extra in extras), (name, error)
        print("needs", name)
for call in (lambda: csd.integrations.nothing, lambda: csd.kernels.nothing):
    try:
        call()
    except AttributeError as error:
        print(error)
"""
DOORS = (
    "csd.integrations.vllm.Proposer",
    "csd.integrations.lm_eval.CSDLM",
    "csd.integrations.tensor_parallel.ParallelEngine",
    "csd.integrations.trl.Rollout",
    "csd.integrations.ray.sample",
    "csd.kernels.common.noise.gumbel",
)
WITHOUT = """
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("trl", "ray", "lm_eval", "pyarrow"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

import importlib.util
real = importlib.util.find_spec
import csd.utils.lazy
csd.utils.lazy.find_spec = lambda name: None if name in ("trl", "ray", "pyarrow") else real(name)
missing = Missing()
sys.meta_path.insert(0, missing)
for call in (
    lambda: csd.integrations.trl.Rollout(),
    lambda: csd.integrations.ray.sample(None, "model", num_samples=1),
    lambda: csd.integrations.lm_eval,
):
    try:
        call()
    except ImportError as error:
        print(error)
sys.meta_path.remove(missing)
csd.utils.lazy.find_spec = real
"""


def test_import_csd_loads_little_and_has_every_name():
    """In one process, since each imports torch. Missing packages are named with their extra."""
    assert len(NAMED) > 20
    loaded, *missing = lines_of(LOADED + WITHOUT + RESOLVE, *NAMED, *DOORS)
    assert loaded == "[]"
    missing, resolved = missing[:3], missing[3:]
    for line, extra in zip(missing, ("trl", "ray", "lm-eval"), strict=True):
        assert pip_install(extra) in line
        assert f"{extra} = [" in (ROOT / "pyproject.toml").read_text()
    assert resolved[-2:] == [
        "module 'csd.integrations' has no attribute 'nothing'",
        "module 'csd.kernels' has no attribute 'nothing'",
    ]
    # classes that derive from another library's, and the module of one
    assert {*resolved[:-2]} <= {
        "needs csd.integrations.lm_eval.CSDLM",
        "needs csd.integrations.lm_eval",
        "needs csd.integrations.trl.GRPOTrainer",
    }


def test_an_editable_install_is_a_path_that_type_checkers_read(tmp_path):
    """They run no import hook."""
    pytest.importorskip("setuptools", "77")
    for name in ("pyproject.toml", "README.md", "LICENSE", "csd", "tests", "bench"):
        (tmp_path / name).symlink_to(ROOT / name)
    code = "import sys; from setuptools.build_meta import build_editable as b; b(sys.argv[1])"
    (tmp_path / "out").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = [n for n in archive.namelist() if ".dist-info/" not in n]
        assert [Path(n).suffix for n in files] == [".pth"]
        assert Path(archive.read(files[0]).decode().strip()) == tmp_path


@slow
def test_pytest_times_operations_by_backend():
    """Options of the project stand in the way of none of pytest-benchmark's."""
    pytest.importorskip("pytest_benchmark")
    # in what looks like a worker of xdist nothing is timed
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "bench/micro",
            "--benchmark-only",
            "-k",
            "rms_norm and tiny",
        ],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for backend in BACKENDS:
        assert f"test_step[rms_norm-{backend}-tiny]" in done.stdout
    assert f"benchmark: {len(BACKENDS)} tests" in done.stdout
