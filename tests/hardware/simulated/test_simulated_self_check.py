"""The check of a GPU's kernels: captured steps are compared with the same steps uncaptured."""

import pytest
import torch
from helpers.targets import slow
from simulated_gpu import Gpu

from csd.doctor import SMALL, Check, CheckSizes, run
from csd.doctor.compare import differences
from csd.kernels.ops import triton
from csd.models.demo import random_decoder

pytestmark = pytest.mark.stand_in


def by_rows(x, weight, bias=None):
    """Beyond 20 rows sums are in parts that are rounded, as a library may have them."""
    parts = 16 if x.shape[0] > 20 else 1
    pairs = zip(x.chunk(parts, -1), weight.chunk(parts, -1), strict=True)
    return sum(torch.nn.functional.linear(*pair) for pair in pairs)


@slow
def test_products_whose_last_bits_depend_on_the_rows_pass(monkeypatch):
    def decoder(*args, **options):
        made = random_decoder(*args, **options)
        made.linear = by_rows
        return made

    monkeypatch.setattr(run, "random_decoder", decoder)
    monkeypatch.setattr(run, "check_machine", lambda: [Check("compiler", 1)])
    sizes = CheckSizes(prompt=70, prefill_chunk=64, tokens=24, rows=16)
    with Gpu():
        # torch without CUDA has no current device to take an index from
        device = torch.device("cuda", 0)
        options = dict(kernels="triton", exact=False, sizes=sizes, ops=triton())
        runs = run._Runs(SMALL, device, torch.bfloat16, **options)
        pair: list = []
        for static in (False, True):
            with runs._engine(static) as engine:
                pair.append(runs._draw(engine))
        assert differences(*pair)
        report = run.check(device, torch.bfloat16, sizes=sizes)
    assert not report.failed, report.table()
    assert "captured steps" in {c.name for c in report.checks}
