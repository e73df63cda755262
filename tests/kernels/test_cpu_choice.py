"""Which operations an engine on a CPU runs."""

import numba
import pytest
import torch

import csd.kernels.cpu as cpu
from csd.kernels import ops
from csd.kernels.cpu import attention, layers

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("threads", "together", "loops"),
    [(1, True, True), (2, True, True), (16, True, True), (4, False, True), (5, False, False)],
)
def test_loops_run_unless_many_threads_would_wait_for_one(monkeypatch, threads, together, loops):
    monkeypatch.setattr(ops, "compiles", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 16)
    monkeypatch.setattr("csd.kernels.cpu.threads._shared", lambda: together)
    found = ops.Ops.choose(None, CPU)
    assert found.name == "reference"
    assert (found.rms_norm is layers.rms_norm) == loops
    assert (found.verify is not ops.reference().verify) == loops
    assert (found.tree_attention is attention.tree_attention) == loops


def test_without_numba_and_on_request_the_references_run(monkeypatch):
    assert ops.Ops.choose("reference", CPU) == ops.reference()
    monkeypatch.setattr(ops, "compiles", lambda: False)
    assert ops.Ops.choose(None, CPU) == ops.reference()


BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("machine", "amx", "bf16", "amd", "taken"),
    [
        ("x86_64", False, False, False, {BF16, F32}),
        ("x86_64", False, True, False, {BF16, F32}),
        ("x86_64", False, False, True, {BF16, F32}),
        ("x86_64", False, True, True, {F32}),
        ("x86_64", True, True, False, {F32}),
        ("aarch64", False, False, False, set()),
    ],
)
def test_products_are_loops_by_the_kind_of_cpu(monkeypatch, machine, amx, bf16, amd, taken):
    monkeypatch.setattr(cpu, "compiles", lambda: True)
    monkeypatch.setattr(cpu.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    monkeypatch.setattr(cpu, "_of_amd", lambda: amd)
    every = (BF16, F32, torch.float16, torch.float64)
    assert {d for d in every if cpu._is_faster.__wrapped__(d)} == taken


@pytest.mark.parametrize(("threads", "together", "loop"), [(2, True, True), (1, False, True),
                                                           (2, False, False)])  # fmt: skip
def test_products_are_loops_only_in_all_of_pytorch_s_threads(monkeypatch, threads, together, loop):
    monkeypatch.setattr(cpu, "_is_faster", lambda dtype: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 16)
    monkeypatch.setattr("csd.kernels.cpu.threads._shared", lambda: together)
    assert cpu.multiplies(F32) == loop
