"""Noise and draws as a CPU's loops: the references' to the bit, values within rounding."""

import numpy as np
import pytest
import torch
from helpers.kernels.tree_cases import trees

from csd.kernels.common.noise import ACCEPT, SAMPLE, gumbel, philox_words, stepped
from csd.kernels.numba import math as noise
from csd.kernels.numba.jit import loop
from csd.kernels.verify.cpu.cuts import masses, weigh
from csd.kernels.verify.cpu.draws import draw_row, rank
from csd.kernels.verify.reference_rows import Draws, Heads, draw_ref

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


def test_words_of_adjacent_tokens():
    for key, first, position, sample, stream in (
        (-1, 0, 0, 0, SAMPLE),
        (2**63 - 1, 151936 - 256, 4095, 63, stepped(ACCEPT, 17)),
        (1 << 40, 8, 2**31 - 1, 2**31 - 1, SAMPLE),
    ):
        for count in (4, 12, 256):
            out = np.zeros(count, np.uint32)
            noise.philox_words(key, first, position, sample, stream, out)
            token = np.arange(first, first + count)
            assert np.array_equal(out, philox_words(key, token, position, sample, stream))


@loop
def draw(heads, rows, key, sample, vocab, works, out):
    (token, score, rest_mass), (slot, position) = heads, rows
    drawn, logprob, log_total, top_token, top_prob = out
    mass, words, top = works
    for m in range(token.shape[0]):
        kind = type(rest_mass[m])
        low, rest = kind(-np.inf), rest_mass[m]
        weigh(score[m], mass)
        head, _ = masses(score[m], mass, low)
        log_total[m] = np.log(kind(head) + rest)
        rank(token[m], score[m], low, log_total[m], False, top, top_token[m], top_prob[m])
        of = key[slot[m]], sample[slot[m]], position[m]
        place = draw_row(token[m], score[m], mass, low, rest, of, vocab, words)
        drawn[m] = vocab if place < 0 else token[m, place]
        logprob[m] = (np.log(rest) if place < 0 else score[m, place]) - log_total[m]


def drawn(heads, rows, slots, vocab):
    R, dtype = len(rows[0]), heads.score.dtype
    out = Draws(
        torch.empty(R, dtype=torch.long),
        torch.empty(R, dtype=dtype),
        torch.empty(R, dtype=dtype),
        torch.empty(R, 8, dtype=torch.long),
        torch.empty(R, 8),
    )
    arrays = [tuple(x.contiguous().numpy() for x in of) for of in (heads, rows[:2], out)]
    W = heads.token.shape[1]
    works = (
        torch.empty(W, dtype=dtype).numpy(),
        np.empty(256, np.uint32),
        torch.empty(8, dtype=dtype).numpy(),
    )
    draw(*arrays[:2], slots.key.numpy(), slots.sample.numpy(), vocab, works, arrays[2])
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("W", "V"), [(11, 999), (300, 999), (999, 999)], ids=str)
def test_draws_are_the_references(W, V, dtype):
    """Ties, heads of other lengths, few tokens of a piece and all, filtered ones, an empty rest."""
    g, R = torch.Generator().manual_seed(1), 60
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
    rest = torch.rand(R, generator=g, dtype=dtype) * W / 11
    rest[::4] = 0
    rows = (
        torch.randint(7, (R,), generator=g),
        torch.randint(99, (R,), generator=g),
        torch.zeros(R, dtype=torch.bool),
        torch.ones(R, dtype=torch.bool),
    )
    heads = Heads(token, score, rest)
    got, want = drawn(heads, rows, slots, V), draw_ref(heads, *rows, slots, V)
    assert torch.equal(got.token, want.token) and (want.token == V).any()
    assert torch.equal(got.top_token, want.top_token)
    for name in ("logprob", "log_total", "top_prob"):
        x, y = getattr(got, name), getattr(want, name)
        eps = torch.finfo(x.dtype).eps
        torch.testing.assert_close(x, y, rtol=4 * eps, atol=16 * eps)
