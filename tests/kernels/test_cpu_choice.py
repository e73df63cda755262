"""Which operations an engine on a CPU runs."""

import pytest
import torch

from csd.kernels import ops
from csd.kernels.cpu import attention, layers
from csd.kernels.tree_attention.batched import tree_attention_batched

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("threads", "amx", "norm", "attend"),
    [
        (1, False, True, True),
        (2, False, True, True),
        # steps have many rows there
        (2, True, True, False),
        (4, False, True, False),
        (5, False, False, False),
    ],
)
def test_loops_run_where_threads_are_few(monkeypatch, threads, amx, norm, attend):
    monkeypatch.setattr(ops, "compiles", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    found = ops.Ops.choose(None, CPU)
    assert found.name == "reference"
    assert (found.rms_norm is layers.rms_norm) == norm
    assert (found.verify is not ops.reference().verify) == norm
    want = attention.tree_attention if attend else tree_attention_batched
    assert found.tree_attention is want


def test_without_numba_and_on_request_the_references_run(monkeypatch):
    assert ops.Ops.choose("reference", CPU) == ops.reference()
    monkeypatch.setattr(ops, "compiles", lambda: False)
    assert ops.Ops.choose(None, CPU) == ops.reference()
