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
DOT, NO_DOT = "+avx2,+avx512bf16", "+avx2,-avx512bf16"


@pytest.mark.parametrize(
    ("machine", "amx", "features", "kind", "taken"),
    [
        ("x86_64", False, NO_DOT, "haswell", {BF16: "fma", F32: "fma"}),
        ("x86_64", False, DOT, "cooperlake", {BF16: "fma", F32: "fma"}),
        ("x86_64", False, NO_DOT, "znver3", {BF16: "fma", F32: "fma"}),
        ("x86_64", False, DOT, "znver4", {BF16: "dot", F32: "fma"}),
        ("x86_64", True, DOT, "sapphirerapids", {F32: "fma"}),
        ("aarch64", False, "+neon", "neoverse-v1", {}),
    ],
)
def test_products_are_loops_by_the_kind_of_cpu(
    monkeypatch, machine, amx, features, kind, taken
):
    monkeypatch.setattr(cpu, "compiles", lambda: True)
    monkeypatch.setattr(cpu.platform, "machine", lambda: machine)
    monkeypatch.setattr(cpu, "has_amx", lambda: amx)
    monkeypatch.setattr("csd.kernels.cpu.lanes.FEATURES", features)
    monkeypatch.setattr("csd.kernels.cpu.lanes.CPU", kind)
    monkeypatch.setattr(cpu, "instructions", cpu.instructions.__wrapped__)
    for dtype in (BF16, F32, torch.float16, torch.float64):
        assert cpu.instruction.__wrapped__(dtype) == taken.get(dtype)


@pytest.mark.parametrize(("threads", "together", "loop"), [(2, True, True), (1, False, True),
                                                           (2, False, False)])  # fmt: skip
def test_products_are_loops_only_in_all_of_pytorch_s_threads(monkeypatch, threads, together, loop):
    monkeypatch.setattr(cpu, "instruction", lambda dtype: "fma")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 16)
    monkeypatch.setattr("csd.kernels.cpu.threads._shared", lambda: together)
    assert cpu.multiplies(F32) == loop
