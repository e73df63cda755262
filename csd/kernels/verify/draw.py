"""Draws of one row: the winner of its head, and a token of the rest."""

import triton
import triton.language as tl

from csd.kernels import noise
from csd.kernels.keep_largest import keep_largest
from csd.kernels.noise import gumbel32, philox_word, uniform32
from csd.kernels.verify.filters import LAST, load_tile, passes
from csd.kernels.verify.row import INF_BITS, distance, load_logits
from csd.state.verdict import TOP as _TOP

SAMPLE, REST = tl.constexpr(noise.SAMPLE), tl.constexpr(noise.REST)
TOP = tl.constexpr(_TOP)


@triton.jit
def draw_head(
    rest,
    width,
    cuts,  # kth, cut, cut_token and min_p, as `passes` takes them
    at,  # key, position, sample index and whether the row is greedy
    size,
    listed,
    source,
    STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns masses of head and rest, the winner's noisy score, token and score, and the leaders.

    Leaders are the TOP likeliest tokens as codes [TOP] of distance, then token; larger: likelier.
    """
    kth, cut, cut_token, min_p = cuts
    key, position, index, greedy = at
    head = tl.zeros((), tl.float32)
    best = tl.full((), float("-inf"), tl.float32)
    sample = tl.zeros((), tl.int32)
    chosen = tl.zeros((), tl.float32)
    leaders = tl.full([TOP], -1, tl.int64)
    largest = tl.full((), LAST, tl.int64)
    for start in range(0, size, BLOCK):
        token, d = load_tile(start, listed, source, STOPS, BLOCK)
        kept = passes(d, token, kth, cut, cut_token, min_p)
        in_head = kept & (d <= width)
        mass = tl.exp(-d)
        head += tl.sum(tl.where(in_head, mass, 0.0), 0)
        if listed < 0:
            rest += tl.sum(tl.where(kept & (d > width), mass, 0.0), 0)
        noisy = -d
        if greedy == 0:
            noisy += gumbel32(philox_word(key, token, position, index, SAMPLE))
        noisy = tl.where(in_head, noisy, float("-inf"))
        most = tl.max(noisy, 0)
        who = tl.min(tl.where(in_head & (noisy == most), token, LAST), 0)
        score = -tl.sum(tl.where(in_head & (token == who), d, 0.0), 0)
        sample = tl.where(most > best, who, sample)
        chosen = tl.where(most > best, score, chosen)
        best = tl.maximum(best, most)

        near = tl.full((), INF_BITS, tl.int32) - d.to(tl.int32, bitcast=True)
        code = (near.to(tl.int64) << 31) | (largest - token)
        code = tl.where(in_head, code, -1)
        leaders = keep_largest(code, leaders, TOP)
    return head, rest, best, sample, chosen, leaders


@triton.jit
def draw_rest(
    rest,
    rest_ptr,  # [SPLITS] float32, of the row
    width,
    cuts,
    at,
    listed,
    source,
    vocab,
    chunk,
    STOPS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns a token of the rest and its score, by inverse CDF in token order.

    The token is clamped to the last one of the rest.
    """
    kth, cut, cut_token, min_p = cuts
    key, position, index, _ = at
    row, _, _, temperature, top = source
    word = philox_word(key, 0 * vocab, position, index, REST)
    target = uniform32(word) * rest
    below = tl.zeros((), tl.float32)
    start = tl.zeros((), tl.int32)
    if listed >= 0:
        masses = tl.load(rest_ptr + tl.arange(0, SPLITS))
        last_chunk = tl.max(tl.where(masses > 0, tl.arange(0, SPLITS), 0), 0)
        for c in range(SPLITS):
            mass_c = tl.load(rest_ptr + c)
            on = (below + mass_c <= target) & (start == c * chunk) & (c < last_chunk)
            below = tl.where(on, below + mass_c, below)
            start = tl.where(on, (c + 1) * chunk, start)
    found = tl.full((), LAST, tl.int32)
    last = tl.zeros((), tl.int32)
    whole = tl.full((), -1, tl.int32)
    while (start < vocab) & (found == LAST):
        token, d = load_tile(start, whole, source, STOPS, BLOCK)
        other = passes(d, token, kth, cut, cut_token, min_p) & (d > width)
        mass = tl.where(other, tl.exp(-d), 0.0)
        upto = below + tl.cumsum(mass, 0)
        found = tl.min(tl.where(other & (upto > target), token, LAST), 0)
        last = tl.maximum(last, tl.max(tl.where(other, token, 0), 0))
        below += tl.sum(mass, 0)
        start += BLOCK
    sample = tl.where(found < LAST, found, last)
    _, x = load_logits(row, sample + tl.zeros([1], tl.int32), STOPS)
    return sample, -tl.sum(distance(x, top, temperature), 0)


@triton.jit
def likeliest(leaders, log_total, greedy):
    """Tokens and probabilities [TOP] of `draw_head`'s leaders, -1 and 0 if there are fewer."""
    near = (leaders >> 31).to(tl.int32)
    d = (tl.full((), INF_BITS, tl.int32) - near).to(tl.float32, bitcast=True)
    prob = tl.where(leaders >= 0, tl.exp(-d - log_total), 0.0)
    prob = tl.where(greedy, (tl.arange(0, TOP) == 0).to(tl.float32), prob)
    token = (tl.full((), LAST, tl.int64) - (leaders & LAST)).to(tl.int32)
    return tl.where(prob > 0, token, -1), prob
