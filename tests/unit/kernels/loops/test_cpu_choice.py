"""Choice of operations on a CPU."""

import numba
import pytest
import torch

from csd.kernels import backends
from csd.kernels.attention.cpu import attention
from csd.kernels.backends import choose
from csd.kernels.layers.cpu import elementwise
from csd.kernels.numba import isa
from csd.kernels.ops import reference

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")


F32, F64, F16 = torch.float32, torch.float64, torch.float16


@pytest.mark.parametrize(
    ("threads", "together", "loops"),
    [(1, True, True), (2, True, True), (16, True, True), (4, False, True), (5, False, False)],
)
def test_loops_run_unless_many_threads_would_wait_for_one(monkeypatch, threads, together, loops):
    monkeypatch.setattr(backends, "compiles", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 16)
    monkeypatch.setattr("csd.kernels.numba.threads._shared", lambda: together)
    found = choose(None, CPU, F32)
    assert found.name == ("cpu" if loops else "reference")
    assert (found.rms_norm is elementwise.rms_norm) == loops
    assert (found.verify is not reference().verify) == loops
    assert (found.tree_attention is attention.tree_attention) == loops
    # by name they run whatever the threads
    assert choose("cpu", CPU, F32).name == "cpu"


def test_by_dtype():
    assert choose(None, CPU, F16) == reference()
    assert choose("reference", CPU, F32) == reference()
    wide = choose(None, CPU, F64)
    assert wide.name == "cpu" and wide.tree_attention is attention.tree_attention
    assert (wide.rms_norm, wide.swiglu) == (reference().rms_norm, reference().swiglu)


def test_without_numba_the_references_run_and_one_warning_names_it(monkeypatch):
    monkeypatch.setattr(backends, "compiles", lambda: False)
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    backends._warn_without_numba.cache_clear()
    with pytest.warns(UserWarning, match="pip install numba") as found:
        assert choose(None, CPU, F32) == choose(None, CPU, F32) == reference()
    assert len(found) == 1
    with pytest.raises(ValueError, match="kernels='cpu' needs numba"):
        choose("cpu", CPU, F32)


@pytest.mark.parametrize(
    ("kernels", "device", "dtype", "message"),
    [
        ("cpu", "cpu", F16, "needs one of bfloat16, float32, float64; got float16"),
        ("cpu", "cuda", F32, "needs a device 'cpu'; got 'cuda'"),
        ("numba", "cpu", F32, "must be 'reference', 'cpu' or 'triton', got 'numba'"),
        (3, "cpu", F32, "must be 'reference', 'cpu' or 'triton', got 3"),
    ],
)
def test_a_name_that_cannot_run_is_refused(kernels, device, dtype, message):
    with pytest.raises(ValueError, match=message):
        choose(kernels, torch.device(device), dtype)


BF16 = torch.bfloat16
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
def test_products_are_loops_by_the_kind_of_cpu(monkeypatch, machine, amx, features, kind, taken):
    monkeypatch.setattr(isa, "compiles", lambda: True)
    monkeypatch.setattr(isa.platform, "machine", lambda: machine)
    monkeypatch.setattr(isa, "has_amx", lambda: amx)
    monkeypatch.setattr("csd.kernels.numba.lanes.FEATURES", features)
    monkeypatch.setattr("csd.kernels.numba.lanes.CPU", kind)
    monkeypatch.setattr(isa, "instructions", isa.instructions.__wrapped__)
    for dtype in (BF16, F32, torch.float16, torch.float64):
        assert isa.instruction(dtype) == taken.get(dtype)


@pytest.mark.parametrize(
    ("threads", "together", "loop"), [(2, True, True), (1, False, True), (2, False, False)]
)
def test_products_are_loops_only_in_all_of_pytorch_s_threads(monkeypatch, threads, together, loop):
    monkeypatch.setattr(isa, "instruction", lambda dtype: "fma")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 16)
    monkeypatch.setattr("csd.kernels.numba.threads._shared", lambda: together)
    assert isa.multiplies(F32) == loop
