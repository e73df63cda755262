"""A row's draw from its head and rest; the reference is `draw_ref`.

A token's score with its noise is at least s only if the exponential E of its word is at most
mass e^-s, and E is at least (word + 1/2) / 2^32. So a word is compared with one product, and few
tokens of a long head need logarithms. Words of adjacent tokens are computed together.
"""

import numpy as np

from csd.kernels.common.noise import REST, SAMPLE
from csd.kernels.numba.jit import loop
from csd.kernels.numba.math import exp, gumbel, log, philox_word, philox_words
from csd.state.verdict import TOP

# as many words are computed at once as the workspace has; where a head has fewer tokens of so many
# adjacent ones, each word is computed alone
FEW = 16
# scores that are compared at once
BLOCK = 64
# above all errors of rounding
SLACK = 1.001


@loop
def after(token, first, end, bound):
    """First place from `first` to `end` whose token is not below `bound`; tokens ascend."""
    while first < end:
        middle = (first + end) // 2
        if token[middle] < bound:
            first = middle + 1
        else:
            end = middle
    return first


@loop
def draw_row(
    token,  # [W]
    score,  # [W]
    mass,  # [W]
    low,  # least score of the head; of the listed tokens below, one may be drawn as the rest
    rest,  # their mass, and that of others
    noise,  # key, sample and position
    vocab,
    words,  # workspace
):
    """Draw a row's token; returns its place in the list, or -1 for the rest."""
    kind = type(rest)
    key, sample, position = noise
    best, won, bound = kind(-np.inf), np.int64(-1), kind(np.inf)
    first, width = 0, words.shape[0]
    while first < token.shape[0]:
        base = token[first] // width * width
        end = after(token, first, min(first + width, token.shape[0]), base + width)
        together = end - first >= FEW
        likely = end - first
        if together:
            philox_words(key, base, position, sample, SAMPLE, words)
            likely = 0
            of_run, of_mass = token[first:end], mass[first:end]
            for j in range(of_run.shape[0]):
                word = words[of_run[j] - base]
                likely += kind(word) <= of_mass[j] * bound
        if likely > 0:
            for w in range(first, end):
                if score[w] < low:
                    continue
                t = token[w]
                word = np.uint64(words[t - base])
                if not together:
                    word = philox_word(key, t, position, sample, SAMPLE)
                if kind(word) <= mass[w] * bound:
                    noisy = score[w] + gumbel(word, kind)
                    # tokens are in ascending order: the first maximum has the smallest id
                    if noisy > best:
                        best, won = noisy, w
                        bound = exp(-best) * kind(2.0**32 * SLACK)
        first = end
    if rest > 0:
        word = philox_word(key, vocab, position, sample, SAMPLE)
        if log(rest) + gumbel(word, kind) > best:
            return np.int64(-1)
    return won


@loop
def rest_target(noise, total):
    """The number in [0, total) at which the rest's token is drawn, in token order."""
    kind = type(total)
    key, sample, position = noise
    word = philox_word(key, 0, position, sample, REST)
    u = kind((np.float64(word) + 0.5) * 2.0**-32)
    return min(u, np.nextafter(kind(1), kind(0))) * total


@loop
def draw_rest(score, mass, low, noise):
    """Place in the list of the rest's token, by inverse CDF in token order."""
    kind, total = type(low), 0.0
    for w in range(score.shape[0]):
        total += mass[w] if score[w] < low else kind(0)
    target, below, last = rest_target(noise, kind(total)), 0.0, np.int64(0)
    for w in range(score.shape[0]):
        if score[w] < low and mass[w] > 0:
            below, last = below + mass[w], w
            if kind(below) > target:
                break
    return last


@loop
def rank(
    token,  # [W]
    score,  # [W]
    low,  # least score of the head
    log_total,  # log of the row's mass
    greedy,
    top,  # [8], workspace
    top_token,  # [8], written
    top_prob,  # [8], written
):
    """Write the head's likeliest tokens and their probabilities; for a greedy row only one."""
    top[:] = -np.inf
    top_token[:] = -1
    for first in range(0, token.shape[0], BLOCK):
        part = score[first : min(first + BLOCK, token.shape[0])]
        larger = 0
        for j in range(part.shape[0]):
            larger += part[j] > top[TOP - 1]
        for w in range(first, first + part.shape[0] if larger > 0 else first):
            value = score[w]
            if value > top[TOP - 1] and value >= low:
                # after equal ones
                j = TOP - 1
                while j > 0 and top[j - 1] < value:
                    top[j], top_token[j] = top[j - 1], top_token[j - 1]
                    j -= 1
                top[j], top_token[j] = value, token[w]
    for j in range(TOP):
        prob = np.float32(exp(top[j] - log_total))
        if greedy:
            prob = np.float32(j == 0)
        top_prob[j] = prob if prob > 0 else 0
        top_token[j] = top_token[j] if prob > 0 else -1
