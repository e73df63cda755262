"""Products with the quantised matrices of GGUF files: formats, rounding, loops and gradients."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.kernels.quantized import dequantized, random_matrix, random_rows
from torch import nn

from csd.kernels.layers.quantized import (
    Quantized,
    QuantizedStack,
    has_loop,
    quantized_linear,
    quantized_linear_ref,
    tensor,
    unrounded,
)
from csd.kernels.layers.quantized.formats import FORMATS
from csd.kernels.layers.quantized.rounding import DIGIT, GROUP, OUTLIER, round_rows_ref

every_format = pytest.mark.parametrize("name", FORMATS)
# types whose loops differ most; the others' code is made of the same parts
PAIRED = {"vnni": ("Q4_K", "Q6_K"), "avx_vnni": ("Q8_0", "Q5_1"), "avx2": ("Q4_K", "IQ4_XS")}


if has_loop():
    from csd.kernels.layers.quantized.cpu.product import instructions

ROOT = Path(__file__).parents[4]
INSTRUCTIONS = instructions() if has_loop() else ()


def loop_cases():
    for name in FORMATS:
        for by in INSTRUCTIONS:
            marks = () if name in PAIRED[by] else (pytest.mark.slow,)
            yield pytest.param(name, by, marks=marks, id=f"{name}-{by}")


def product(*args):
    from csd.kernels.layers.quantized.cpu.product import product

    return product(*args)


def rows_with_outliers(M, K, seed=0):
    """Rows of normal numbers, of which each third has a block of large ones."""
    x = torch.randn(M, K, generator=torch.manual_seed(seed))
    x[::3, 5] = 100 * OUTLIER
    return x


@every_format
@pytest.mark.parametrize("N", [1, 31, 32, 75])
def test_the_layout_holds_the_files_numbers(name, N):
    rows = random_rows(name, N, 768)
    matrix, want = Quantized.of_file(rows, FORMATS[name]), dequantized(rows, name)
    assert matrix.shape == want.shape and matrix.dtype == torch.float32
    assert torch.equal(matrix.dequantize(), want)
    ids = torch.tensor([[N - 1, 0], [N // 2, N - 1]])
    assert torch.equal(F.embedding(ids, matrix), want[ids])


@every_format
@pytest.mark.parametrize("N", [1, 33, 1000])
def test_the_loop_lays_out_the_references_bytes(name, N, monkeypatch):
    if not tensor.compiles():
        pytest.skip("loops are not compiled here")
    size = FORMATS[name].size * (512 // FORMATS[name].numbers)
    rows = np.random.default_rng(N).integers(0, 256, (N, size), dtype=np.uint8)
    monkeypatch.setattr(tensor, "AT_ONCE", 1 << 14)
    (laid,) = Quantized.of_file(rows, FORMATS[name]).parts
    monkeypatch.setattr(tensor, "compiles", lambda: False)
    (want,) = Quantized.of_file(rows, FORMATS[name]).parts
    assert torch.equal(laid.data, want.data) and laid.rows == N


@every_format
def test_a_format_is_the_files(name):
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (
        FORMATS[name].numbers,
        FORMATS[name].size,
    )


def test_a_number_is_rounded_by_half_a_step_of_its_group():
    x = torch.randn(64, 512, generator=torch.manual_seed(0))
    x[0], x[1, :GROUP], x[2, 7] = 0, 0, 20
    top = x.unflatten(1, (-1, GROUP)).abs().amax(-1, keepdim=True)
    limit = (top / 127 * 0.50001).expand(-1, -1, GROUP).flatten(1)
    error = (round_rows_ref(x) - x).abs()
    assert (error <= limit).all() and error[3:].max() > 0.3 * limit[3:].max()


def test_a_row_with_an_outlier_has_second_digits():
    x = rows_with_outliers(9, 768)
    error = (round_rows_ref(x) - x).abs().unflatten(1, (-1, GROUP))
    top = x.unflatten(1, (-1, GROUP)).abs().amax(-1, keepdim=True)
    assert (error[::3] <= top[::3] / 127 / DIGIT).all()
    assert (error[1] > top[1] / 127 / 8).any()


@pytest.mark.parametrize(("name", "by"), loop_cases())
def test_a_loop_computes_the_formula(name, by):
    """In float32 sums; the bits are equal for any rows, threads, places and instructions."""
    N, K, most = 75, 768, 20
    weight, x = random_matrix(name, N, K), rows_with_outliers(most, K)
    bias = torch.randn(N, generator=torch.manual_seed(1))
    whole = product(x, weight, bias, by)
    rounded, w = round_rows_ref(x).double(), weight.dequantize().double()
    size = rounded.abs() @ w.abs().T
    # two roundings for each group of 16, and as many in the digits' scales
    limit = (4 * K / 16 + 8) * torch.finfo(torch.float32).eps / 2 * (size + bias.abs())
    assert ((whole.double() - (rounded @ w.T + bias)).abs() <= limit).all()
    for rows in range(most):
        assert torch.equal(product(x[:rows], weight, bias, by), whole[:rows])
        assert torch.equal(product(x[rows : rows + 1], weight, bias, by), whole[rows : rows + 1])
    from csd.kernels.layers.quantized.cpu.product import instructions

    other = "vnni" if by == "avx2" else "avx2"
    # a processor without an instruction compiles no code for it
    if other in instructions() and name in PAIRED[other] and name in PAIRED[by]:
        assert torch.equal(product(x, weight, bias, other), whole)


# code for whole tiles, as of AVX512, whose products are those of a narrower CPU by halves
WHOLE = """
import csd.kernels.layers.quantized.cpu.tile as tile
from csd.kernels.numba.simd import halves, places

narrow = tile._dot

def dot(b, name, format, total, w, x):
    parts = zip(halves(b, total), *(halves(b, v) for v in (*w, *x)), strict=True)
    sums = [narrow(b, name, format, t, v[: len(w)], v[len(w) :]) for t, *v in parts]
    return b.shuffle_vector(*sums, places(range(16)))

tile._dot, tile.LANES = dot, dict.fromkeys(tile.LANES, 16)
"""
BITS = """
import numpy as np, torch, zlib
from helpers.kernels.quantized import random_rows
from csd.kernels.layers.quantized import Quantized, quantized_linear
from csd.kernels.layers.quantized.formats import FORMATS

for name in ("Q4_K", "Q5_1", "IQ4_NL"):
    weight = Quantized.of_file(random_rows(name, 75, 768), FORMATS[name])
    for M in range(1, 9):
        x = torch.randn(M, 768, generator=torch.Generator().manual_seed(M))
        print(name, M, zlib.crc32(quantized_linear(x, weight).numpy().tobytes()))
"""


@pytest.mark.slow
@pytest.mark.skipif("vnni" in INSTRUCTIONS or not INSTRUCTIONS, reason="a CPU with half tiles")
def test_whole_tiles_have_the_bits_of_their_halves(tmp_path):
    """A CPU of 8 numbers in a vector runs the code of one with 16."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    printed = [
        subprocess.run(
            [sys.executable, "-c", code + BITS],
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / str(i)), "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for i, code in enumerate(("", WHOLE))
    ]
    assert printed[0] == printed[1] and len(printed[0].splitlines()) == 24


@pytest.mark.skipif(not has_loop(), reason="no loop of quantised weights here")
def test_bits_are_equal_with_two_threads():
    weight, x = random_matrix("Q4_K", 2048, 512), torch.randn(7, 512)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(quantized_linear(x, weight))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


def near_in_float32(found, x, w):
    """found is x w, up to the rounding of sums and of a bias that was added and subtracted."""
    limit = 8 * torch.finfo(torch.float32).eps * (x.double().abs() @ w.double().abs() + 8)
    assert ((found.double() - x.double() @ w.double()).abs() <= limit).all()


@every_format
def test_a_gradients_product_reads_the_files_numbers(name):
    """In the loop where there is one; also with more rows than are dequantised at once."""
    whole = Quantized.cat([random_matrix(name, rows, 768, rows) for rows in (75, 1600, 33)])
    assert torch.equal(torch.eye(whole.shape[0]) @ whole, whole.dequantize())
    x = torch.randn(2, 3, whole.shape[0])
    near_in_float32(x @ whole, x, whole.dequantize())
    with pytest.raises(NotImplementedError, match="no gradient"):
        x.requires_grad_() @ whole


@every_format
def test_an_unrounded_product_is_that_of_the_dequantised_matrix(name):
    weight, x, bias = random_matrix(name, 75, 768), torch.randn(3, 768), torch.randn(75)
    with unrounded():
        found = F.linear(x, weight, bias)
    near_in_float32(found - bias, x, weight.dequantize().T)


def test_a_rounded_product_is_not_that_of_the_dequantised_matrix():
    """The control of the test above, by a type whose loop other tests compile."""
    weight, x = random_matrix("Q4_K", 75, 768), torch.randn(3, 768)
    with pytest.raises(AssertionError):
        near_in_float32(F.linear(x, weight), x, weight.dequantize().T)


def test_copies_share_their_numbers():
    weight = random_matrix("Q4_K", 64, 512)
    stack = QuantizedStack([weight, random_matrix("Q4_K", 64, 512, 1)])
    for x in (weight, stack):
        made = copy.deepcopy({1: nn.Parameter(x, requires_grad=False)})[1]
        assert isinstance(made, nn.Parameter) and type(made) is type(x)
        assert [y.data_ptr() for y in made.stored] == [y.data_ptr() for y in x.stored]
        # another process has its own
        other = pickle.loads(pickle.dumps(made))
        assert isinstance(other, nn.Parameter) and torch.equal(other.dequantize(), x.dequantize())
        with pytest.raises(NotImplementedError, match="has no storage of float32"):
            made.untyped_storage()
        # as a module's `to` does for a process of several
        assert made.to("cpu:0").stored[0].data_ptr() == x.stored[0].data_ptr()
        with pytest.raises(NotImplementedError, match=r"stays on the CPU, .*float16"):
            made.half()


def test_parts_of_several_types_are_one_matrix():
    parts = [random_matrix(n, rows, 512) for n, rows in (("Q4_K", 33), ("Q6_K", 16), ("Q4_K", 48))]
    whole, x = Quantized.cat(parts), torch.randn(5, 512)
    assert torch.equal(whole.dequantize(), torch.cat([p.dequantize() for p in parts]))
    for part, of_whole in zip(parts, whole.split([33, 16, 48]), strict=True):
        assert of_whole.data_ptr() == part.data_ptr() and of_whole.shape == part.shape
    assert torch.equal(whole.rows(torch.tensor([96, 0, 40])), whole.dequantize()[[96, 0, 40]])
    # rows beyond the matrix are in the padding of its last tile
    for row in (-1, whole.shape[0]):
        with pytest.raises(IndexError, match=f"ids must be rows 0 to .*, got {row} to {row}"):
            whole.rows(torch.tensor([row]))
    apart = torch.cat([quantized_linear(x, p) for p in parts], 1)
    assert torch.equal(quantized_linear(x, whole), apart)
    want = quantized_linear_ref(x, whole)
    assert (apart - want).abs().max() <= 1e-5 * want.abs().max()


def test_not_a_number_stays_in_its_row():
    weight, x = random_matrix("Q4_K", 64, 512), torch.randn(4, 512)
    clean = quantized_linear(x, weight)
    x[1, 300], x[2, 5] = float("nan"), float("inf")
    y = quantized_linear(x, weight)
    assert torch.equal(y[[0, 3]], clean[[0, 3]])
    assert y[1].isnan().all() and not y[2].isfinite().any()


def test_a_linear_takes_it_and_passes_gradients_to_x():
    weight = random_matrix("Q4_K", 64, 512)
    linear = nn.Linear(512, 64)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    x = torch.randn(2, 3, 512, requires_grad=True)
    linear(x).backward(grad := torch.randn(2, 3, 64))
    near_in_float32(x.grad.flatten(0, 1), grad.flatten(0, 1), weight.dequantize())
    assert linear.weight.grad is None
    torch.testing.assert_close(linear.bias.grad, grad.sum((0, 1)))


def test_a_stack_gives_its_matrices():
    matrices = [random_matrix("Q4_K", 32, 256, seed) for seed in range(3)]
    stack = nn.Parameter(QuantizedStack(matrices), requires_grad=False)
    assert stack.shape == (3, 32, 256)
    assert torch.equal(stack[1].dequantize(), matrices[1].dequantize())
    assert torch.equal(stack.dequantize()[2], matrices[2].dequantize())


def test_other_operations_are_refused_by_name():
    matrix = random_matrix("Q4_0", 32, 64)
    for weight in (matrix, QuantizedStack([matrix])):
        with pytest.raises(NotImplementedError, match=r"aten\.add.*dequantize"):
            weight + 1
        assert (weight.dequantize() + 1).shape == weight.shape
    with pytest.raises(TypeError, match="float32"):
        quantized_linear(torch.zeros(1, 64, dtype=torch.bfloat16), random_matrix("Q4_0", 32, 64))
