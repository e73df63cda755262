"""The wheel works away from the source."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A new virtual environment with the wheel; what csd needs is this one's."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # setuptools leaves files in the tree it builds from
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        source.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source)
    for name in ("csd", "tests", "bench", "examples", "docs"):
        skip = shutil.ignore_patterns("__pycache__", "results", "*.gz")
        shutil.copytree(ROOT / name, source / name, ignore=skip)
    # the wheel comes out of the source distribution, which must hold all it needs
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    assert list(folder.glob("csd-*.tar.gz"))
    (wheel,) = folder.glob("csd-*.whl")
    env = folder / "env"
    venv.create(env, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    to = ["--python", env / "bin" / "python"]
    subprocess.run([*pip, *to, "install", "--no-deps", wheel], env=clean(), check=True)
    (packages,) = env.glob("lib/python*/site-packages")
    # a path alone: links to source trees that lie there are not followed
    (packages / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return env


def clean():
    """The environment variables, without those by which this source tree would be found."""
    found = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return found | {"TRITON_INTERPRET": "1"}


def run(env, command, *args):
    """The output of a command of the environment."""
    done = subprocess.run(
        [env / "bin" / command, *args], cwd=env, env=clean(), capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return done.stdout


def test_the_wheel_holds_the_package_and_nothing_else(installed):
    (packages,) = installed.glob("lib/python*/site-packages")
    tops = {p.name for p in packages.iterdir() if not p.name.endswith(".dist-info")}
    assert tops == {"csd", "needed.pth"}
    assert (packages / "csd" / "py.typed").exists()
    assert list((packages / "csd" / "evaluate" / "report").glob("*.js"))
    assert list((packages / "csd" / "integrations" / "serve").glob("*.html"))


def test_the_wheel_draws_samples(installed, checkpoint):
    # nothing is compiled, which takes a minute and depends on no file but these
    code = (
        "import csd, csd.cpu, importlib.util, pkgutil, sys;"
        "loops = [m.name for m in pkgutil.iter_modules(csd.cpu.__path__)];"
        "loops = loops if importlib.util.find_spec('numba') else [];"
        "[importlib.import_module(f'csd.cpu.{name}') for name in loops];"
        "engine = csd.Engine(sys.argv[1], kernels='reference');"
        "out = csd.generate(engine, [5, 6, 7], num_samples=2, max_new_tokens=3, seed=0);"
        "print(csd.__file__, len(out), len(out.tokens[0]))"
    )
    path, count, tokens = run(installed, "python", "-c", code, checkpoint("llama")).split()
    assert path.startswith(str(installed)) and (count, tokens) == ("2", "3")
    assert "sample" in run(installed, "csd", "--help")


def test_import_takes_no_extra(installed):
    code = (
        "import sys, csd;"
        "heavy = {'ray', 'trl', 'lm_eval', 'matplotlib', 'scipy', 'playwright'};"
        "heavy |= {'starlette', 'uvicorn'};"
        # imported when they are needed: a model by name, PyTorch's compiler
        "heavy |= {'transformers', 'torch._dynamo'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert run(installed, "python", "-c", code).strip() == "[]"
