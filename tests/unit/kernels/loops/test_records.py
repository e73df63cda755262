"""A loop opens a view's addresses as the arrays that the view has of its tensors."""

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from csd.kernels.numba.jit import loop
from csd.kernels.numba.records import Sizes, opener
from csd.kernels.table import rows
from csd.kernels.verify import views
from csd.state.record import allocate

SIZES = dict(M=5, S=3, G=2, N=4, T=7, A=17, C=6, E=8, words=2)
VIEWS = {
    f"{module.__name__} {name}": view
    for module, names in ((views, "POOL SLOTS VERDICT ADVANCED TREES"), (rows, "POOL SLOTS TABLE"))
    for name, view in ((name, getattr(module, name)) for name in names.split())
}


@pytest.mark.parametrize("floats", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", VIEWS)
def test_arrays_are_those_of_the_tensors(name, floats):
    view = VIEWS[name]
    opened = opener(view)

    @loop
    def arrays(addresses, sizes, like):
        return opened(addresses, sizes, like)

    tensors = allocate(view.record, SIZES, "cpu", floats)
    for i, x in enumerate(tensors.values()):
        x.copy_(
            torch.arange(i, i + x.numel()).view(x.shape) % 2
            if x.dtype == torch.bool
            else torch.arange(i, i + x.numel()).view(x.shape)
        )
    record = view.kind(*(tensors[field] for field in view.names))
    like = torch.empty(0, dtype=floats).numpy()
    got = arrays(view.addresses(record, floats), Sizes(**SIZES), like)
    for x, want in zip(got, view.arrays(record), strict=True):
        assert x.dtype == want.dtype and np.array_equal(x, want)
