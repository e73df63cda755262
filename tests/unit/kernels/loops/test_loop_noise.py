"""Noise and draws as a CPU's loops: the references' to the bit, values within rounding."""

import numpy as np
import pytest
import torch
from helpers.kernels.tree_cases import trees

from csd.kernels.common.noise import ACCEPT, SAMPLE, gumbel, philox_words, stepped
from csd.kernels.numba import math as noise
from csd.kernels.numba.jit import loop
from csd.kernels.verify.cpu.draws import draw_row
from csd.kernels.verify.reference_rows import Draws, Heads, Rows, draw_ref

EDGES = [0, 1, 2, 2**22 - 1, 2**22, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1]


@loop
def words(key, token, position, sample, stream, out):
    for i in range(out.shape[0]):
        out[i] = noise.philox_word(key[i], token[i], position[i], sample[i], stream[i])


def test_words_are_the_references():
    rng = np.random.default_rng(0)
    key = rng.integers(-(2**63), 2**63 - 1, 500)
    token, position, sample = rng.integers(0, 2**31 - 1, (3, 500))
    stream = np.where(rng.random(500) < 0.5, SAMPLE, stepped(ACCEPT, rng.integers(0, 999, 500)))
    out = np.empty(500, np.int64)
    words(key, token, position, sample, stream, out)
    assert np.array_equal(out, philox_words(key, token, position, sample, stream))


@loop
def gumbels(word, out):
    for i in range(out.shape[0]):
        out[i] = noise.gumbel(np.uint64(word[i]), type(out[i]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gumbel_values_are_finite_and_as_near_as_the_references(dtype):
    word = torch.cat([torch.tensor(EDGES), torch.randint(2**32, (20000,))])
    got, want = torch.empty(word.shape, dtype=dtype), gumbel(word, dtype)
    gumbels(word.numpy(), got.numpy())
    # float64 holds 1 - v exactly
    u = ((2**32 - 1 - word).double() + 0.5) * 2.0**-32
    exact = -(-u.log()).log()
    assert got.isfinite().all()
    eps = torch.finfo(dtype).eps
    error, limit = ((x.double() - exact).abs() for x in (got, want))
    assert error.max() <= 2 * limit.max() + eps * exact.abs().max()


@loop
def draw(heads, rows, key, sample, vocab, top, out):
    (token, score, rest_mass), (slot, position, greedy, _) = heads, rows
    drawn, logprob, log_total, top_token, top_prob = out
    for m in range(token.shape[0]):
        drawn[m], logprob[m], log_total[m] = draw_row(
            token[m],
            score[m],
            rest_mass[m],
            key[slot[m]],
            sample[slot[m]],
            position[m],
            greedy[m],
            vocab,
            top,
            top_token[m],
            top_prob[m],
        )


def drawn(heads, rows, slots, vocab):
    R, dtype = rows.slot.shape[0], heads.score.dtype
    out = Draws(
        torch.empty(R, dtype=torch.long),
        torch.empty(R, dtype=dtype),
        torch.empty(R, dtype=dtype),
        torch.empty(R, 8, dtype=torch.long),
        torch.empty(R, 8),
    )
    arrays = [tuple(x.contiguous().numpy() for x in of) for of in (heads, rows, out)]
    top = torch.empty(8, dtype=dtype).numpy()
    draw(*arrays[:2], slots.key.numpy(), slots.sample.numpy(), vocab, top, arrays[2])
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_draws_are_the_references(dtype):
    """Ties, heads of other lengths, filtered tokens, an empty rest, and greedy rows."""
    g = torch.Generator().manual_seed(1)
    R, W, V = 60, 11, 999
    _, slots = trees(2, count=7, rows=9, live=True)
    token = torch.sort(torch.stack([torch.randperm(V, generator=g)[:W] for _ in range(R)])).values
    score = -torch.rand(R, W, generator=g, dtype=dtype) * 8
    score[::3] = score[::3].round()
    score[torch.arange(R), torch.randint(W, (R,), generator=g)] = 0
    score[1::7, 2:5] = -torch.inf
    padding = torch.arange(W) >= torch.randint(1, W + 1, (R, 1), generator=g)
    padding &= score < 0
    padding = padding.flip(1).cummin(1).values.flip(1)
    token, score = token.masked_fill(padding, V), score.masked_fill(padding, -torch.inf)
    rest = torch.rand(R, generator=g, dtype=dtype)
    rest[::4] = 0
    rows = Rows(
        torch.randint(7, (R,), generator=g),
        torch.randint(99, (R,), generator=g),
        torch.rand(R, generator=g) < 0.3,
        torch.ones(R, dtype=torch.bool),
    )
    heads = Heads(token, score, rest)
    got, want = drawn(heads, rows, slots, V), draw_ref(heads, rows, slots, V)
    assert torch.equal(got.token, want.token) and (want.token == V).any()
    assert torch.equal(got.top_token, want.top_token)
    for name in ("logprob", "log_total", "top_prob"):
        x, y = getattr(got, name), getattr(want, name)
        eps = torch.finfo(x.dtype).eps
        torch.testing.assert_close(x, y, rtol=4 * eps, atol=16 * eps)
