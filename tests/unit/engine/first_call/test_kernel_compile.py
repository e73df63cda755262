"""Kernels of a GPU's step are compiled by child processes, once per model and machine."""

import gc
import time
from types import SimpleNamespace

import pytest
import torch
from helpers.runs.simulated_calls import engine
from simulated_gpu import Gpu
from triton import knobs
from triton.backends.compiler import GPUTarget

from csd.engine.first_call import compile_kernels as kernel_compile
from csd.kernels.common.compile_jobs import named
from csd.models.fused.config import ModelConfig

TARGET = named("sm_90")


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Lines that children write in place of compiling: one per job."""
    file = tmp_path / "compiled"
    file.touch()

    def compile_(source, target, options):
        with open(file, "a") as out:
            out.write(f"{source} {target.arch}\n")

    monkeypatch.setattr(kernel_compile.triton, "compile", compile_)
    return lambda: sorted(file.read_text().split("\n")[:-1])


def jobs(count):
    return lambda step, target: [SimpleNamespace(source=i, options={}) for i in range(count)]


@pytest.mark.parametrize("processes, count", [(1, 3), (2, 5), (3, 3), (5, 2), (2, 1)])
def test_each_job_is_compiled_by_one_child(compiled, monkeypatch, processes, count):
    monkeypatch.setattr(kernel_compile, "jobs_of", jobs(count))
    assert kernel_compile.compile_in_children(None, TARGET, processes)
    assert compiled() == [f"{i} 90" for i in range(count)]


def test_children_free_no_graphs(monkeypatch, tmp_path):
    """The collector may free a graph, which calls CUDA, and a forked process cannot use it."""

    def compile_(source, target, options):
        (tmp_path / "collects").write_text(str(gc.isenabled()))

    monkeypatch.setattr(kernel_compile, "jobs_of", jobs(1))
    monkeypatch.setattr(kernel_compile.triton, "compile", compile_)
    assert kernel_compile.compile_in_children(None, TARGET, 1)
    assert (tmp_path / "collects").read_text() == "False" and gc.isenabled()


def test_a_kernel_that_does_not_compile_is_left_to_its_launch(compiled, monkeypatch, caplog):
    def broken(source, target, options):
        if source == 1:
            raise RuntimeError("no such instruction")

    monkeypatch.setattr(kernel_compile, "jobs_of", jobs(3))
    monkeypatch.setattr(kernel_compile.triton, "compile", broken)
    assert not kernel_compile.compile_in_children(None, TARGET, 3)
    assert "RuntimeError: no such instruction" in caplog.text


def test_a_machine_without_room_for_processes_compiles_at_each_launch(monkeypatch, caplog):
    def no_room():
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(kernel_compile.os, "fork", no_room)
    assert not kernel_compile.compile_in_children(None, TARGET, 2)
    assert (
        "fewer processes than planned compile kernels: Resource temporarily unavailable"
        in caplog.text
    )


def test_an_error_of_all_children_is_logged_once(monkeypatch, caplog):
    def no_jobs(step, target):
        raise TypeError("a tensor has no values")

    monkeypatch.setattr(kernel_compile, "jobs_of", no_jobs)
    assert not kernel_compile.compile_in_children(None, TARGET, 3)
    assert caplog.text.count("TypeError: a tensor has no values") == 1


def test_children_that_do_not_end_are_ended(monkeypatch):
    monkeypatch.setattr(kernel_compile, "jobs_of", lambda step, target: time.sleep(60))
    monkeypatch.setattr(kernel_compile, "SECONDS", 0.3)
    start = time.monotonic()
    assert not kernel_compile.compile_in_children(None, TARGET, 2)
    assert time.monotonic() - start < 30
    with pytest.raises(ChildProcessError):
        kernel_compile.os.waitpid(-1, kernel_compile.os.WNOHANG)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a GPU and an empty cache; the configs of steps that were compiled."""
    found, target = [], SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setattr(kernel_compile, "driver", SimpleNamespace(active=target))
    monkeypatch.setattr(kernel_compile, "chip_of", lambda device: TARGET.chip)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def compile_(step, target, processes):
        found.append(step.decoder.config)
        return len(found) > 1

    monkeypatch.setattr(kernel_compile, "compile_in_children", compile_)
    return found


def step_of(config, dtype=torch.bfloat16, device="cuda:0"):
    live = SimpleNamespace(device=torch.device(device))
    return SimpleNamespace(
        slots=SimpleNamespace(live=live),
        cache=SimpleNamespace(dtype=dtype),
        decoder=SimpleNamespace(config=config),
        drafter=None,
    )


def test_a_model_is_compiled_once_and_again_where_it_was_not_complete(machine):
    for _ in range(4):
        kernel_compile.compile_kernels(step_of("a"), False)
    # the first was not complete
    assert machine == ["a", "a"]
    for step, exact in [(step_of("b"), False), (step_of("a", torch.float16), False)]:
        kernel_compile.compile_kernels(step, exact)
    kernel_compile.compile_kernels(step_of("a"), True)
    assert machine == ["a", "a", "b", "a", "a"]


def test_a_user_without_a_home_compiles_at_each_launch(machine, monkeypatch):
    def without_home(*_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(kernel_compile, "path_of", without_home)
    kernel_compile.compile_kernels(step_of("a"), False)
    assert not machine


def test_references_and_loops_compile_nothing(machine):
    kernel_compile.compile_kernels(step_of("a", device="cpu"), False)
    assert not machine


def test_interpreted_kernels_are_not_compiled(machine, monkeypatch):
    monkeypatch.setattr(knobs.runtime, "interpret", True)
    kernel_compile.compile_kernels(step_of("a"), False)
    assert not machine


def test_an_engine_on_a_gpu_compiles_what_new_caches_launch(monkeypatch):
    steps = []
    monkeypatch.setattr(kernel_compile, "compile_kernels", lambda step, exact: steps.append(step))
    with Gpu(), engine("cuda") as e:
        for _ in range(2):
            e.generate([1, 2, 3], num_samples=2, max_new_tokens=3, seed=0)
    assert [type(step.drafter).__name__ for step in steps] == ["ConsensusGraph"]


def config(**changed):
    return ModelConfig(
        family="a",
        vocab=9,
        hidden=8,
        intermediate=8,
        layers=6,
        heads=1,
        kv_heads=1,
        head_dim=8,
        context=9,
        norm_eps=1e-6,
        rope_theta=1e4,
        **changed,
    )


def test_first_layers_have_every_kind_of_layer():
    assert config().unlike_layers == 2
    local = (True, True, True, True, False, True)
    assert config(local=local, window=4).unlike_layers == 6
    assert config(rotated=(True, False, True, False, True, False)).unlike_layers == 3
