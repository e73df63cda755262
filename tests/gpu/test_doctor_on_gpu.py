"""The kernels' own check on the GPU at hand: `make test-gpu`."""

import os

import pytest
import torch

from csd.engine.self_check import check

pytestmark = pytest.mark.skipif(
    os.environ.get("CSD_TEST_DEVICE") != "cuda", reason="needs a GPU: make test-gpu"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
def test_every_operation(dtype, exact):
    report = check("cuda", dtype, exact=exact)
    assert not report.failed, report.table()
