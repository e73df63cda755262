"""A row's softmax in the CPU's vectors, against numpy in float64 and against the loops' `exp`."""

import math

import numpy as np
import pytest
from helpers.targets import pairs

pytest.importorskip("numba")
from numba import njit

from csd.kernels.attention.cpu.softmax import exponentials, softmax
from csd.kernels.numba.lanes import BLOCK, WIDTH, block, put
from csd.kernels.numba.math import exp

ONE = np.float32(1)
OLD = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, WIDTH - 1, WIDTH, WIDTH + 1, 130, 1000]


def a_row(old, nodes, dtype, seed=0):
    """Scores, NaN where none is; bits of nodes, the last one among them."""
    random = np.random.default_rng((old, nodes, seed))
    x = np.full(old + nodes + BLOCK, np.nan, dtype)
    x[: old + nodes] = 5 * random.standard_normal(old + nodes)
    seen = random.random(nodes) < 0.4
    seen[-1] = True
    x[old : old + nodes][~seen] = np.nan
    word = sum(1 << j for j in range(nodes) if seen[j])
    return x, seen, np.array([word], np.uint64).view(np.int64)[0]


@pairs
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("nodes", [1, 2, BLOCK, BLOCK + 1, 64])
@pytest.mark.parametrize("old", OLD)
@pytest.mark.parametrize("scale", [1, 0.3])
def test_weights_and_their_sum(old, nodes, dtype, scale):
    x, seen, word = a_row(old, nodes, dtype)
    scale = dtype(scale)
    shown = np.r_[np.full(old, True), seen]
    # the difference is rounded, which moves e^x by more than that itself
    scores = (scale * (x[: old + nodes] - x[: old + nodes][shown].max())).astype(np.float64)
    expected = np.where(shown, np.exp(scores), 0)
    total = softmax(x, scale, old, nodes, word, np.full(WIDTH, np.nan, dtype))[0]
    assert not x[: old + nodes][~shown].any()
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(x[: old + nodes], expected, rtol=3 * eps, atol=0)
    # none is negative, so each of the additions a weight goes through adds half an eps at most:
    # of its lane's others, two where a row's rest and its nodes begin, and of the lanes
    additions = -(-(old + nodes) // WIDTH) + 2 + np.log2(WIDTH)
    limit = (3 + additions / 2) * eps
    np.testing.assert_allclose(total, math.fsum(expected), rtol=limit, atol=0)


@pytest.mark.parametrize("old", OLD)
def test_hidden_nodes_do_not_change_a_sum(old):
    """Nor whether a key is committed or a node."""
    x, _, _ = a_row(old, 9, np.float32)
    x[: old + 9] = np.random.default_rng(old).standard_normal(old + 9)
    chain = x[:old].tolist() + x[old : old + 9].tolist()
    sums = np.empty(WIDTH, np.float32)
    expected = softmax(x.copy(), ONE, old, 9, np.int64(0x1FF), sums)[0]
    hidden = np.full(old + 18 + BLOCK, np.nan, np.float32)
    hidden[:old], hidden[old : old + 18 : 2] = chain[:old], chain[old:]
    assert softmax(hidden, ONE, old, 17, np.int64(0x15555), sums)[0] == expected
    committed = np.full(old + 9 + BLOCK, np.nan, np.float32)
    committed[: old + 9] = chain
    assert softmax(committed, ONE, old + 8, 1, np.int64(1), sums)[0] == expected


def test_a_score_that_is_no_number_shows():
    for at in (0, 70, 84, 86):
        x, _, _ = a_row(85, 3, np.float32)
        x[85:88] = 1
        x[at] = np.nan
        assert np.isnan(softmax(x, ONE, 85, 3, np.int64(7), np.empty(WIDTH, np.float32))[0])


@njit
def both(given, most, scale, by_lanes, one_by_one):
    for at in range(0, given.shape[0], BLOCK):
        put(exponentials(block(given, at), most, scale), by_lanes, at)
    for j in range(given.shape[0]):
        one_by_one[j] = exp((given[j] - most) * scale)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exponentials_have_the_bits_of_exp(dtype):
    random = np.random.default_rng(0)
    least = np.finfo(dtype)
    special = [0.0, -0.0, np.nan, np.inf, -np.inf, least.max, least.min, least.tiny, least.eps]
    given = np.r_[special, random.uniform(-110, 100, 3959), random.standard_normal(128)]
    given = given.astype(dtype)
    assert len(given) % BLOCK == 0
    for most, scale in ((0, 1), (0.4, 0.3), (0.37, 1)):
        found = np.empty_like(given), np.empty_like(given)
        both(given, dtype(most), dtype(scale), *found)
        np.testing.assert_array_equal(found[0], found[1])
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.exp((given - dtype(0.37)).astype(np.float64)).astype(dtype)
    normal = ~(expected < 2 * least.tiny)
    np.testing.assert_allclose(found[0][normal], expected[normal], rtol=3 * least.eps)
