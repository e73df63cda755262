"""The wheel works away from the source."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from helpers.targets import slow

from csd.models.demo import smollm2_path

pytestmark = slow
ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


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
        names = ["results"] if name == "bench" else []
        skip = shutil.ignore_patterns("__pycache__", "*.gz", *names)
        shutil.copytree(ROOT / name, source / name, ignore=skip)
    # the wheel comes out of the source distribution, which must hold all it needs
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    assert list(folder.glob("csd_llm-*.tar.gz"))
    (wheel,) = folder.glob("csd_llm-*.whl")
    env = folder / "env"
    venv.create(env, with_pip=False)
    to = ["--python", env / "bin" / "python"]
    subprocess.run([*PIP, *to, "install", "--no-deps", wheel], env=clean(), check=True)
    (packages,) = env.glob("lib/python*/site-packages")
    # a path alone: links to source trees that lie there are not followed
    (packages / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return env


def clean():
    """The environment variables, without those by which this source tree would be found."""
    found = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return found | {"TRITON_INTERPRET": "1"}


def run(env, command, *args, errors=False):
    """The output of a command of the environment, or its messages."""
    done = subprocess.run(
        [env / "bin" / command, *args],
        cwd=env,
        env=clean(),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr if errors else done.stdout


def test_the_wheel_holds_the_package_and_nothing_else(installed):
    (packages,) = installed.glob("lib/python*/site-packages")
    tops = {p.name for p in packages.iterdir() if not p.name.endswith(".dist-info")}
    assert tops == {"csd", "needed.pth"}
    assert (packages / "csd" / "py.typed").exists()
    assert list((packages / "csd" / "evaluate" / "report").glob("*.js"))
    assert list((packages / "csd" / "serve" / "http").glob("*.html"))


def test_the_wheel_draws_samples(installed, checkpoint):
    # nothing is compiled, which takes a minute and depends on no file but these: products of
    # float32 are loops whatever `kernels` is, those of float64 are not
    code = (
        "import csd, csd.kernels, importlib.util, pkgutil, sys;"
        "loops = [m.name for m in pkgutil.walk_packages(csd.kernels.__path__, 'csd.kernels.')];"
        "loops = loops if importlib.util.find_spec('numba') else [];"
        "[importlib.import_module(name) for name in loops];"
        "engine = csd.Engine(sys.argv[1], kernels='reference', dtype='float64');"
        "out = csd.generate(engine, [5, 6, 7], num_samples=2, max_new_tokens=3, seed=0);"
        "print(csd.__file__, len(out), len(out.tokens[0]))"
    )
    path, count, tokens = run(installed, "python", "-c", code, checkpoint("llama")).split()
    assert path.startswith(str(installed)) and (count, tokens) == ("2", "3")
    assert "sample" in run(installed, "csd", "--help")


def test_the_command_samples_the_demo_model(installed):
    """Away from the source, with the loops that it compiles."""
    sampling = ["sample", smollm2_path(), "2 + 2 is", "-n", "2", "--max-new-tokens", "3"]
    assert run(installed, "csd", *sampling, "--seed", "0", "--json").count('"texts"') == 1


def namesake(folder):
    """A wheel with the name and the files of PyPI's csd, and no code."""
    info = "csd-1.0.0.dist-info"
    files = {
        "csd/__init__.py": "from .methods import *\n",
        "csd/methods.py": "",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: csd\nVersion: 1.0.0\n"
        "Summary: (Constrained) subgroup discovery\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    wheel = folder / "csd-1.0.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in (files | {f"{info}/RECORD": record}).items():
            archive.writestr(name, content)
    return wheel


def test_another_csd_is_noticed_and_the_notice_removes_it(installed, tmp_path):
    (wheel,) = installed.parent.glob("csd_llm-*.whl")
    pip = [*PIP, "--python", installed / "bin" / "python"]

    def install(*arguments):
        arguments = ["--no-index", "--find-links", wheel.parent, *arguments]
        subprocess.run([*pip, "install", *arguments], env=clean(), check=True)

    notice = "the distribution csd 1.0.0 ((Constrained) subgroup discovery) is another project"
    assert notice not in run(installed, "python", "-c", "import csd", errors=True)
    install(namesake(tmp_path))
    # its csd/__init__.py stands in the place of this package's
    assert notice in run(installed, "csd", "--version", errors=True)
    install("--force-reinstall", "--no-deps", "csd-llm")
    message = run(installed, "python", "-c", "import csd; csd.generate", errors=True)
    assert notice in message
    first, second = (words.split() for words in re.findall("`pip ([^`]*)`", message))
    assert first[0] == "uninstall" and second[0] == "install"
    subprocess.run([*pip, first[0], "--yes", *first[1:]], env=clean(), check=True)
    install(*second[1:])
    assert run(installed, "python", "-c", "import csd; csd.generate", errors=True) == ""
    assert not list(installed.glob("lib/python*/site-packages/csd/methods.py"))


def test_import_takes_no_extra(installed):
    code = (
        "import sys, csd;"
        "heavy = {'ray', 'trl', 'lm_eval', 'matplotlib', 'scipy', 'playwright'};"
        "heavy |= {'starlette', 'uvicorn'};"
        # imported when they are needed: a model by name, PyTorch's compiler, an answer in LaTeX
        "heavy |= {'transformers', 'torch._dynamo', 'numba', 'sympy', 'latex2sympy2_extended'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert run(installed, "python", "-c", code).strip() == "[]"
