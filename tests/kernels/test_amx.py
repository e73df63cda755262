"""Products and attention in AMX's tiles: with its instructions emulated, and compiled for a CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")

import numba

from csd.kernels.cpu import amx, products
from csd.kernels.cpu.lanes import FEATURES
from csd.kernels.cpu.numbers import LIKE
from csd.kernels.cpu.tiles import BY, COLUMNS, WIDE

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(not WIDE, reason="the layout is that of AVX-512")


def _emulator():
    """The module, which compiles as it is imported."""
    import amx_emulator

    return amx_emulator


@pytest.fixture(scope="module")
def emulated():
    """The loop compiled without numba's cache, its instructions calls of the emulator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amx, "_instruction", _emulator().instruction)
        compiled = numba.njit(products._product.alone.py_func, error_model="numpy")
        x, weight = torch.ones(1, 32).bfloat16(), torch.ones(1, 32, COLUMNS).bfloat16()
        _run(compiled, x, weight, None)
    return compiled


def _run(compiled, x, weight, bias):
    (M, K), N = x.shape, weight.shape[0] * COLUMNS
    y = torch.full((M, N), float("nan"), dtype=torch.bfloat16)
    wide = None if bias is None else bias.float()
    _emulator().FAULTS[:] = 0
    compiled(
        (M, N, K), x.data_ptr(), 0, weight.data_ptr(), 0 if bias is None else wide.data_ptr(),
        y.data_ptr(), LIKE[torch.bfloat16], BY["amx"],
    )  # fmt: skip
    assert not _emulator().FAULTS[0]
    return y


def _case(rows, K=96, N=2 * COLUMNS, biased=True):
    generator = torch.manual_seed(rows)
    sizes = (rows, K), (N, K), (N,)
    x, weight, bias = (torch.randn(*n, generator=generator).bfloat16() for n in sizes)
    return x, weight, bias if biased else None


def _reference(x, weight, bias):
    """Sums of even and of odd products of each 32, each in float32 in the order of k."""
    x, weight = x.double()[:, None], weight.double()[None]
    total = torch.zeros(x.shape[0], weight.shape[1]) if bias is None else bias.float()
    for first in range(0, x.shape[-1], amx.DEPTH):
        parts = torch.zeros(2, x.shape[0], weight.shape[1])
        for k in range(first, first + amx.DEPTH):
            parts[k % 2] = (parts[k % 2].double() + x[..., k] * weight[..., k]).float()
        total = total + (parts[0] + parts[1])
    return total.bfloat16()


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 31, 32, 33, 50, 64, 97, products.AMX_MOST + 3])
@pytest.mark.parametrize("biased", [False, True])
def test_the_sums_are_those_of_the_instruction(emulated, rows, biased):
    x, weight, bias = _case(rows, biased=biased)
    assert products.fits(weight, "amx")
    got = _run(emulated, x, products.by_columns(weight, "amx"), bias)
    assert torch.equal(got, _reference(x, weight, bias))


@pytest.mark.parametrize("K", [64, 96, 576])
def test_sums_of_which_roundings_alone_are_left(emulated, K):
    """Half of the products negate the others, in another order: other orders have other sums."""
    x, weight, _ = _case(33, K=K, biased=False)
    x *= 2.0 ** torch.randint(-8, 8, (33, K))
    turned = torch.randperm(K // 2)
    x[:, K // 2 :], weight[:, K // 2 :] = x[:, turned], -weight[:, turned]
    got = _run(emulated, x, products.by_columns(weight, "amx"), None)
    expected = _reference(x, weight, None)
    assert torch.equal(got, expected)
    in_order = torch.zeros_like(got, dtype=torch.float32)
    for k in range(K):
        product = x[:, k, None].double() * weight[None, :, k].double()
        in_order = (in_order.double() + product).float()
    assert (in_order.bfloat16() != expected).float().mean() > 0.2


@pytest.mark.parametrize("K", [32, 64, 576])
def test_any_number_of_steps(emulated, K):
    x, weight, bias = _case(19, K=K)
    got = _run(emulated, x, products.by_columns(weight, "amx"), bias)
    assert torch.equal(got, _reference(x, weight, bias))


def test_a_row_has_the_same_bits_among_any_others(emulated):
    x, weight, bias = _case(70)
    blocks = products.by_columns(weight, "amx")
    alone = torch.cat([_run(emulated, row[None], blocks, bias) for row in x])
    for some in (slice(3, 5), slice(0, 17), slice(7, 39), slice(1, 70)):
        assert torch.equal(_run(emulated, x[some], blocks, bias), alone[some])


def test_another_row_s_nan_and_the_memory_around_stay_out(emulated):
    x, weight, bias = _case(40)
    whole = torch.full((42, 96), float("nan"), dtype=torch.bfloat16)
    whole[1:41] = x
    blocks = products.by_columns(weight, "amx")
    want = _run(emulated, x, blocks, bias)
    assert torch.equal(_run(emulated, whole[1:41], blocks, bias), want)
    whole[4] = float("nan")
    got = _run(emulated, whole[1:41], blocks, bias)
    assert got[3].isnan().all()
    others = [i for i in range(40) if i != 3]
    assert torch.equal(got[others], want[others])


def test_the_emulator_finds_faults(emulated):
    """What a CPU would refuse must not pass here."""
    config = torch.zeros(64, dtype=torch.uint8)
    for place, value in ((0, 2), (1, 1), (48, 17), (60, 1)):
        given = torch.zeros(128, dtype=torch.uint8)
        given = given[(-given.data_ptr()) % 64 :][:64]
        given.copy_(config)
        given[0], given[place] = 1, value
        _emulator().FAULTS[:] = 0
        _emulator().ldtilecfg.ctypes(given.data_ptr())
        assert _emulator().FAULTS[0], place
    _emulator().FAULTS[:] = 0


@pytest.mark.skipif("+avx512bf16" not in FEATURES, reason="it rounds attention's weights")
@pytest.mark.skipif("CSD_AMX" in os.environ, reason="those tests run in this process")
def test_attention_in_tiles():
    """The tests of attention by AMX, in a process whose loops are those of a CPU that has it."""
    files = [HERE / f"test_{name}_attention.py" for name in ("tree", "exact")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", "-k", "amx", *files],
        env=os.environ | {"CSD_AMX": "1", "OMP_NUM_THREADS": "1"}, cwd=HERE.parents[1],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    counts = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and counts and int(counts[1]) > 50, done.stdout + done.stderr


CODE = """
import numba
from numba import types
from csd.kernels.cpu import amx_rows, products
from csd.kernels.cpu.tiles import BY
from csd.kernels.cpu.numbers import LIKE
import torch
of = numba.typeof
args = (of((1, 1, 1)), *[types.intp] * 5, of(LIKE[torch.bfloat16]), of(BY["amx"]))
every = "tileloadd", "tdpbf16ps", "tilestored", "ldtilecfg"
rows, flat, index = types.float32[:, ::1], types.float32[::1], types.intp
of_rows = rows, *[index] * 4, flat, index, index, rows, index, types.boolean, types.intp[::1]
for function, given, names in (
    (products._product.alone, args, (*every, "tilerelease")),
    (products._product.together, args, (*every, "tilerelease")),
    (amx_rows.add_by_amx, of_rows, (*every, "tilezero")),
):
    function = numba.njit(function.py_func, parallel=function is products._product.together)
    function.compile(given)
    found = "".join(function.inspect_asm().values())
    for name in names:
        assert name in found, name
print("compiled")
"""


def test_loops_compile_to_amx_s_instructions(tmp_path):
    features = "+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx2,+fma,+f16c,+bmi2,+amx-tile,+amx-bf16"
    name = {"NUMBA_CPU_NAME": "sapphirerapids", "NUMBA_CPU_FEATURES": features}
    environment = os.environ | name | {"NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "compiled\n", done.stderr
