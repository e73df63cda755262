"""A GPU that torch cannot use fails `csd doctor` and is mentioned once; a hidden one is not."""

import json
import warnings

import pytest
import torch

from csd.cli.main import main
from csd.models.load import load
from csd.utils import device as unseen_gpu

VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023"


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A machine without a GPU: files are where the tests put them."""
    for name in unseen_gpu.HIDING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(unseen_gpu, "PROC", tmp_path / "version")
    monkeypatch.setattr(unseen_gpu, "AMD", tmp_path / "kfd")
    monkeypatch.setenv("PATH", str(tmp_path))
    unseen_gpu.warn_of_unseen_gpu.cache_clear()
    yield tmp_path
    unseen_gpu.warn_of_unseen_gpu.cache_clear()


def plant_program(folder, code):
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)


def test_no_gpu_is_no_failure(machine):
    assert unseen_gpu.unseen_gpu() is None
    # an image may have the program
    plant_program(machine, "echo 'No devices were found'; exit 6")
    assert unseen_gpu.unseen_gpu() is None


def test_a_driver_that_is_too_old(machine, capsys, monkeypatch):
    (machine / "version").write_text(VERSION + "\nGCC version: 12.2\n")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert main(["doctor", "--json"]) == 1
    output = capsys.readouterr()
    for part in ("driver 535.104.05", "built for CUDA 13.0", "driver 580", unseen_gpu.OLDER):
        assert part in output.err
    assert json.loads(output.out)["passed"] is False


def test_driver_version_from_nvidia_smi(machine):
    plant_program(machine, "echo 550.54.15")
    assert "driver 550.54.15" in unseen_gpu.unseen_gpu()


def test_a_gpu_without_an_instance(machine):
    """CUDA's advice on the driver would mislead."""
    plant_program(machine, """case $1 in *mig*) echo Enabled;; *) echo 580.65;; esac""")
    found = unseen_gpu.unseen_gpu()
    assert "instances (MIG)" in found and "nvidia-smi -L" in found and "driver" not in found
    plant_program(machine, """case $1 in *mig*) echo '[N/A]';; *) echo 535.1;; esac""")
    assert "driver 535.1" in unseen_gpu.unseen_gpu()


def test_an_amd_gpu(machine):
    (machine / "kfd").touch()
    assert "AMD GPU" in unseen_gpu.unseen_gpu() and "ROCm" in unseen_gpu.unseen_gpu()


@pytest.mark.parametrize("name", unseen_gpu.HIDING)
def test_a_gpu_that_its_user_hides_is_no_failure(name, machine, monkeypatch):
    (machine / "version").write_text(VERSION)
    monkeypatch.setenv(name, "")
    assert unseen_gpu.unseen_gpu() is None
    monkeypatch.setenv(name, "0")
    assert unseen_gpu.unseen_gpu() is not None


def test_a_gpu_that_torch_uses_is_seen(machine, monkeypatch):
    (machine / "version").write_text(VERSION)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert unseen_gpu.unseen_gpu() is None


def test_a_model_on_the_cpu_beside_it_warns_once(machine, toy_folder):
    (machine / "version").write_text(VERSION)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(toy_folder, device="cpu")
        with pytest.raises(UserWarning, match="csd runs on the CPU: this machine has an NVIDIA"):
            load(toy_folder)
    with pytest.warns(UserWarning, match="535"):
        load(toy_folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(toy_folder)
