"""Trees that are accepted in part, for verification along their paths as loops."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from helpers.kernels.tree_cases import random_logits, trees

pytest.importorskip("numba")

from csd.kernels.verify import reference_rows
from csd.kernels.verify.cpu.path import verify_all
from csd.state.pool import Pool

OF_ROWS = "sample", "logprob", "raw_logprob", "top_token", "top_prob"
OF_PATHS = "accept_row", "accept_count", "finish", "bad"


def case(seed=0, vocab=97, dtype=torch.float32, rows=60, **options):
    """Trees that are accepted in part, of greedy and other slots, some of which end."""
    pool, slots = trees(seed, rows=rows, vocab=vocab, **options)
    slots.temperature[:] = torch.linspace(0.5, 1.1, slots.count)
    slots.temperature[::3] = 0
    slots.stop_ids[:, 0] = 1
    slots.stop_ids[::2, 7] = 4
    # a head of all tokens: none is of the rest
    return random_logits(pool.rows, vocab, seed, scale=1.0).to(dtype), pool, slots


def assert_same_paths(got, logits, pool, slots):
    """Assert that accepted rows have the results of all rows, and others none. Returns those."""
    want = verify_all(logits, pool, slots)
    for name in OF_PATHS:
        a, b = getattr(got, name), getattr(want, name)
        assert a.dtype == b.dtype and torch.equal(a, b), name
    on = want.accept_row[want.accept_row >= 0].long()
    off = torch.ones(pool.rows, dtype=torch.bool).index_fill_(0, on, False)
    for name, nothing in zip(OF_ROWS, (-1, 0, 0, -1, 0), strict=True):
        a, b = getattr(got, name), getattr(want, name)
        assert a.dtype == b.dtype and a.shape == b.shape, name
        assert torch.equal(a[on], b[on]), name
        assert (a[off] == nothing).all(), name
    return want


def grown(parents, slots):
    """A pool of one tree a slot, of `parents` within it."""
    S, R = slots.count, len(parents)
    pool = Pool.empty(S * R + 3, S, S, 3)
    for m in range(S * R):
        s, i = divmod(m, R)
        above = s * R + parents[i] if i else -1
        pool.slot[m], pool.parent[m] = s, above
        pool.depth[m] = pool.depth[above] + 1 if i else 0
        pool.ancestors[m] = (pool.ancestors[above] if i else 0) | 1 << i
        pool.cost[m] = pool.depth[m] << 16
    pool.slot_start[:], pool.slot_nodes[:] = torch.arange(S) * R, R
    pool.token[: S * R] = 95
    return pool


def below(logits, by):
    """One likely token a row, and all others so much below that the rest has what they have."""
    logits.fill_(-by)
    logits[:, 3] = 0


@contextmanager
def no_reference():
    """The reference must not compute the filters of a row."""

    def fail(*args):
        raise AssertionError("the reference computed rows")

    with mock.patch.object(reference_rows, "_find_head", fail):
        yield
