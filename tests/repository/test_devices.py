"""Devices of tests: none but the CPU, unless CSD_TEST_DEVICE asks for a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.chosen_device import ON_GPU
from helpers.on_device import launching_on
from triton.runtime.interpreter import GridExecutor

from csd.kernels.layers.rms_norm import rms_norm_ref, rms_norm_triton

TESTS = Path(__file__).parents[1]


@pytest.mark.skipif(ON_GPU, reason="a GPU was asked for")
def test_no_gpu_is_in_sight():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ["HIP_VISIBLE_DEVICES"] == os.environ["ROCR_VISIBLE_DEVICES"] == "-1"
    assert not torch.cuda.is_available()


def test_a_gpu_that_is_not_there_is_refused():
    run = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [*run, str(TESTS / "unit/kernels/table/test_observe.py")],
        cwd=TESTS.parent,
        text=True,
        env=env | {"CSD_TEST_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
    )
    assert done.returncode == 4
    assert "CSD_TEST_DEVICE=cuda needs a GPU that torch can use, and there is none" in done.stderr


class Stop(Exception):
    pass


def test_tensors_are_placed_on_the_device_asked_for():
    """Offsets and strides are kept: they decide what a kernel is compiled to."""
    x = torch.arange(24.0).view(4, 6)
    seen = []

    def launch(kernel, *args, **options):
        seen.append((kernel, args, options))
        raise Stop

    with pytest.raises(Stop):
        launching_on(launch, torch.device("meta"))("k", x.T[1:], (x, 3), grid=(2,), BLOCK=8)
    ((kernel, (part, (whole, number)), options),) = seen
    assert (kernel, number, options) == ("k", 3, {"grid": (2,), "BLOCK": 8})
    assert part.is_meta and whole.is_meta
    assert (part.shape, part.stride()) == (x.T[1:].shape, x.T[1:].stride())
    assert part.storage_offset() == 1 and whole.dtype == x.dtype


def test_views_of_one_memory_stay_so_and_come_back():
    memory = torch.full((8,), float("nan"))
    left, right = memory[:4], memory[2:6]

    def launch(kernel, left, right):
        assert left.data_ptr() != memory.data_ptr()
        left.fill_(1)
        right.add_(1)

    launching_on(launch, torch.device("cpu"))(None, left, right)
    assert memory[:4].tolist() == [1, 1, 2, 2]
    assert memory[4:].isnan().all()


def test_a_kernel_writes_what_its_caller_gave(monkeypatch):
    moved = launching_on(GridExecutor.__call__, torch.device("cpu"))
    monkeypatch.setattr(GridExecutor, "__call__", moved)
    x, weight = torch.randn(3, 8), torch.randn(8)
    out = rms_norm_triton(x, weight, 1e-5)
    torch.testing.assert_close(out, rms_norm_ref(x, weight, 1e-5))
