"""Verification of the rows that decide: what is committed is `verify_ref`'s, to the bit."""

import pytest
import torch
from helpers.kernels.tree_cases import random_logits, trees

from csd.kernels.verify import reference, verify_ref
from csd.kernels.verify import reference as on_path
from csd.kernels.verify.reference import verify_on_path
from csd.state.pool import COST_ONE
from csd.state.pool_builder import roots

pytestmark = pytest.mark.quick

LIKELY = [0, COST_ONE, 1 << 30]


@pytest.fixture
def sampled(monkeypatch):
    """Numbers of rows that were sampled, call by call."""
    rows, real = [], reference.sample_rows

    def counted(logits, *args):
        rows.append(logits.shape[0])
        return real(logits, *args)

    monkeypatch.setattr(reference, "sample_rows", counted)
    return rows


@pytest.mark.parametrize("likely", LIKELY)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_committed_is_the_reference_s(monkeypatch, sampled, likely, seed, dtype):
    monkeypatch.setattr(on_path, "LIKELY", likely)
    pool, slots = trees(seed, rows=60)
    slots.top_k[::3], slots.top_p[1::3], slots.repetition_penalty[2::3] = 20, 0.9, 1.2
    slots.temperature[::4] = 0
    logits = random_logits(pool.rows, 97, seed).to(dtype)
    got = verify_on_path(logits, pool, slots)
    drawn = [*sampled]
    want = verify_ref(logits, pool, slots)
    for name in ("accept_row", "accept_count", "finish", "bad"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    kept = want.accept_row[want.accept_row >= 0].long()
    for name in ("sample", "logprob", "raw_logprob", "top_token", "top_prob"):
        assert torch.equal(getattr(got, name)[kept], getattr(want, name)[kept]), name
    missed = torch.ones(pool.rows, dtype=torch.bool).index_fill_(0, kept, False)
    off = missed & (got.sample < 0)
    assert (got.top_token[off] == -1).all() and not got.top_prob[off].any()
    live = int((pool.slot >= 0).sum())
    assert sum(drawn) < live if likely < COST_ONE else sum(drawn) <= live
    if likely == LIKELY[-1]:
        assert drawn == [live]


def test_a_step_without_drafts_samples_its_roots_at_once(sampled):
    _, slots = trees(0, live=True)
    pool = roots(slots, slots.count)
    verify_on_path(random_logits(pool.rows, 97), pool, slots)
    assert sampled == [slots.count]


def test_rows_beside_the_path_may_be_bad(monkeypatch):
    monkeypatch.setattr(on_path, "LIKELY", 0)
    pool, slots = trees(2, rows=60, live=True)
    logits = random_logits(pool.rows, 97, 2)
    want = verify_on_path(logits, pool, slots)
    off = (want.sample < 0) & (pool.slot >= 0)
    assert off.any()
    logits[off] = torch.nan
    got = verify_on_path(logits, pool, slots)
    assert torch.equal(got.accept_row, want.accept_row) and not got.bad.any()
    logits[pool.slot_start[0]] = torch.nan
    assert verify_on_path(logits, pool, slots).bad[0]


def test_no_live_slot():
    pool, slots = trees(1, live=True)
    slots.live[:] = False
    pool = roots(slots, 3)
    verdict = verify_on_path(random_logits(3, 97), pool, slots)
    assert (verdict.accept_row == -1).all() and (verdict.sample == -1).all()
