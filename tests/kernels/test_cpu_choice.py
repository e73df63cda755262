"""Which operations an engine on a CPU runs."""

import numba
import pytest
import torch

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
