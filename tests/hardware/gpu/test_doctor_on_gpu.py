"""The kernels' own check on the GPU at hand: `make test-gpu`."""

import pytest
import torch
from helpers.chosen_device import ON_GPU

from csd.doctor import check

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(not ON_GPU, reason="needs a GPU: make test-gpu"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
def test_every_operation(dtype, exact):
    report = check("cuda", dtype, exact=exact)
    assert not report.failed, report.table()
