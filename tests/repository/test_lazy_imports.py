"""`import csd` loads what sampling needs; Triton and numba load where an operation needs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import csd
from csd.models.demo import toy

ROOT = Path(__file__).parents[2]
# as where the packages HIDDEN are not installed
HIDE = """
import sys
from importlib.machinery import PathFinder

class WithoutHidden(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in sys.argv[1].split(",")
        return None if hidden else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutHidden
"""
LOADED = """
import sys
before = set(sys.modules)
import csd
heavy = ("triton", "numba", "transformers", "bench", "starlette")
parts = ("csd.research.", "csd.gradient", "csd.kernels.draft.paper")
new = set(sys.modules) - before
print(sorted(n for n in new if n.partition(".")[0] in heavy or n.startswith(parts)))
"""
# draws with the kernels argv[2], then calls that need Triton
DRAW = """
import sys
import csd, torch
from csd.kernels.backends import choose
from test_lazy_imports import draw, toy
print(draw(sys.argv[2]))
print([m for m in ("triton", "numba") if m in sys.modules])
for call in (
    lambda: csd.Engine(toy()[0], kernels="triton"),
    lambda: choose(None, torch.device("cuda"), torch.float16),
    lambda: sys.modules["csd.kernels.verify"].verify_triton(None, None, None),
):
    try:
        call()
    except ImportError as error:
        print(error)
"""


def draw(kernels):
    """Samples of a toy model by each drafter with fixed shapes, in two dtypes."""
    model, tokenizer = toy()
    samples = []
    for drafter, dtype in (
        ("consensus", torch.float32),
        ("paper", torch.float32),
        ("consensus", torch.bfloat16),
    ):
        engine = csd.Engine(model.to(dtype), tokenizer=tokenizer, kernels=kernels, drafter=drafter)
        assert engine.ops.name == kernels
        out = engine.generate("What is 2 + 3?", num_samples=3, max_new_tokens=8, seed=4)
        samples += [s.tokens for s in out.samples]
    return samples


def lines_of(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(Path(__file__).parent)))},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_import_csd_loads_neither_backends_nor_research():
    assert lines_of(LOADED) == ["[]"]


@pytest.mark.parametrize(
    ("hidden", "kernels", "loaded"),
    [("triton", "cpu", ["numba"]), ("numba,triton", "reference", [])],
)
def test_csd_samples_without_triton_and_names_it_for_a_gpu(hidden, kernels, loaded):
    drawn, modules, *errors = lines_of(HIDE + DRAW, hidden, kernels)
    assert drawn == str(draw(kernels))
    assert modules == str(loaded)
    for line, user in zip(errors, ("kernels='triton'", "a GPU", "verify_triton"), strict=True):
        assert line.startswith(user) and "pip install triton" in line
