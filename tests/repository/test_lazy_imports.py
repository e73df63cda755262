"""Triton and numba load where an operation needs them, and csd samples without them."""

import os
import subprocess
import sys
from pathlib import Path

import torch

import csd
from csd.models.demo import toy

ROOT = Path(__file__).parents[2]
# as where the packages of `hidden` are not installed
HIDE = """
import sys
hidden = ["triton", "numba"]
from importlib.machinery import PathFinder

class WithoutHidden(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        found = name.partition(".")[0] not in hidden
        return PathFinder.find_spec(name, path, target) if found else None

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutHidden
"""
# draws without both and, in the same process, which takes seconds to begin, without Triton alone;
# then calls that need Triton
DRAW = """
import csd, torch
from csd.kernels.backends import choose
from csd.kernels.common.cpu import compiles
from test_lazy_imports import draw, toy

for kernels in ("reference", "cpu"):
    print(draw(kernels))
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
    hidden[:] = ["triton"]
    compiles.cache_clear()
"""


def draw(kernels):
    """Samples of a toy model by each drafter with fixed shapes, in two dtypes."""
    model, tokenizer = toy()
    samples = []
    for drafter, dtype in (("consensus", torch.float32), ("paper", torch.bfloat16)):
        engine = csd.Engine(model.to(dtype), tokenizer=tokenizer, kernels=kernels, drafter=drafter)
        assert engine.ops.name == kernels
        out = engine.generate("What is 2 + 3?", num_samples=2, max_new_tokens=5, seed=4)
        samples += [s.tokens for s in out.samples]
    return samples


def lines_of(code):
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(Path(__file__).parent)))},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_csd_samples_without_triton_and_names_it_for_a_gpu():
    lines = iter(lines_of(HIDE + DRAW))
    for kernels, loaded in (("reference", []), ("cpu", ["numba"])):
        assert next(lines) == str(draw(kernels))
        assert next(lines) == str(loaded)
        for user in ("kernels='triton'", "a GPU", "verify_triton"):
            line = next(lines)
            assert line.startswith(user) and "pip install triton" in line
    assert not [*lines]
