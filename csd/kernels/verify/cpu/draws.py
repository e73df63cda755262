"""A row's draw from its head and rest; the reference is `draw_ref`."""

import numpy as np

from csd.kernels.common.noise import SAMPLE
from csd.kernels.numba.jit import loop
from csd.kernels.numba.math import gumbel, philox_word
from csd.state.verdict import TOP


@loop
def draw_row(
    token,  # [W]
    score,  # [W]
    rest_mass,
    key,
    sample,
    position,
    greedy,
    vocab,
    top,  # [8], workspace
    top_token,  # [8], written
    top_prob,  # [8], written
):
    """Draw a row's token; returns it, its log-probability and the log of the row's mass.

    The token is `vocab` if the rest is drawn. Writes the 8 likeliest tokens of the head.
    """
    kind = type(rest_mass)
    total, best, won = 0.0, kind(-np.inf), 0
    top[:] = -np.inf
    top_token[:] = -1
    for w in range(token.shape[0] + 1):
        rest = w == token.shape[0]
        value = np.log(rest_mass) if rest else score[w]
        if not rest:
            total += np.exp(value)
            _rank(top, top_token, value, token[w])
        # -inf: removed by the filters, or padding
        if value == -np.inf or (rest and greedy):
            continue
        noisy = value
        if not greedy:
            t = vocab if rest else token[w]
            noisy += gumbel(philox_word(key, t, position, sample, SAMPLE), kind)
        # heads are in token order: the first maximum has the smallest id
        if noisy > best:
            best, won = noisy, w
    rest = won == token.shape[0]
    log_total = np.log(kind(total) + rest_mass)
    drawn = vocab if rest else token[won]
    logprob = (np.log(rest_mass) if rest else score[won]) - log_total
    for j in range(TOP):
        prob = np.float32(np.exp(top[j] - log_total))
        prob = (np.float32(1) if j == 0 else np.float32(0)) if greedy else prob
        top_prob[j] = prob if prob > 0 else 0
        top_token[j] = top_token[j] if prob > 0 else -1
    return drawn, logprob, log_total


@loop
def _rank(top, ids, value, token):
    """Inserts a token into the list of the largest values, after equal ones."""
    if value > top[-1]:
        j = top.shape[0] - 1
        while j > 0 and top[j - 1] < value:
            top[j], ids[j] = top[j - 1], ids[j - 1]
            j -= 1
        top[j], ids[j] = value, token
