"""Verification as a CPU's loop: decisions of `verify_ref` for every filter and pair of filters."""

import math
from dataclasses import fields
from itertools import combinations

import pytest
import torch
from decide_cases import OF_PATHS, OF_ROWS, no_reference
from helpers.checks.equal_fields import assert_equal_fields
from helpers.kernels.tree_cases import random_logits, trees
from helpers.targets import few

from csd.kernels.verify import verify_ref
from csd.kernels.verify.cpu import path
from csd.kernels.verify.cpu.heads import log_sum
from csd.kernels.verify.reference_rows import log_sum_ref, row_logits
from csd.kernels.verify.token_logprobs import token_logprobs_ref
from csd.state.pool_builder import roots
from csd.state.slots import Slots

FILTERS = {
    "none": {},
    "top-k": {"top_k": 5},
    "most": {"top_k": 90},
    "top-p": {"top_p": 0.8},
    "likeliest": {"top_p": 1e-6},
    "min-p": {"min_p": 0.05},
    "typical": {"typical_p": 0.7},
    "penalty": {"repetition_penalty": 1.3},
    "reward": {"repetition_penalty": 0.8},
    "end tokens later": {"min_new": 30},
    "greedy": {"temperature": 0.0},
}
PAIRS = {a: FILTERS[a] for a in FILTERS} | {
    f"{a} and {b}": FILTERS[a] | FILTERS[b] for a, b in combinations([*FILTERS][1:], 2)
}
QWEN = dict(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05)
LOW = [torch.bfloat16, torch.float16, torch.float32]
DTYPES = pytest.mark.parametrize("dtype", [*LOW, torch.float64], ids=str)
# rows of which kind, with equal values or without some tokens
ROWS = {
    "random": lambda x: x,
    "ties": lambda x: x.round(),
    "all equal": lambda x: x.fill_(0.3),
    "few tokens": lambda x: x.masked_fill_(torch.arange(x.shape[1]) % 3 == 0, -torch.inf),
    "signed zeros": lambda x: x.clamp_(max=0).mul_(torch.arange(x.shape[1]) % 2 * 2 - 1),
}


def case(options, kind, dtype, vocab=97, seed=3, every=2):
    """Trees that are accepted in part, of which every other slot has the options."""
    pool, slots = trees(seed, count=4, rows=16, vocab=vocab, live=True)
    g = torch.Generator().manual_seed(1)
    slots.seen[:] = torch.randint(-(1 << 31), 1 << 31, slots.seen.shape, generator=g).int()
    if vocab % 32:
        slots.seen[:, -1] &= (1 << vocab % 32) - 1
    slots.ban_ids[:, 0], slots.ban_ids[:, 5] = 2, 40
    for name, value in options.items():
        getattr(slots, name)[::every] = value
    return ROWS[kind](random_logits(pool.rows, vocab, seed)).to(dtype), pool, slots


def assert_near(got, want, exact, length):
    """`assert_equal_fields` of what is finite, and the same NaN and -inf."""
    kind, names = type(want), getattr(want, "_fields", None) or [f.name for f in fields(want)]
    parts = {name: [getattr(x, name) for x in (got, want, exact)] for name in names}
    for name, (a, b, _) in parts.items():
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isneginf(), b.isneginf()), name
        parts[name] = [x.masked_fill(~b.isfinite(), 0) for x in parts[name]]
    records = (kind(**{name: x[i] for name, x in parts.items()}) for i in range(3))
    assert_equal_fields(*records, length)


def assert_decides(logits, pool, slots):
    """Assert the reference's verdict of all rows, and on the paths the same bits as of all rows."""
    want, exact = verify_ref(logits, pool, slots), verify_ref(logits.double(), pool, slots)
    got = path.verify_all(logits, pool, slots)
    assert_near(got, want, exact, logits.shape[1])
    along = path.verify(logits, pool, slots)
    for name in OF_PATHS:
        assert torch.equal(getattr(along, name), getattr(want, name)), name
    on = want.accept_row[want.accept_row >= 0].long()
    for name in OF_ROWS:
        a, b = getattr(along, name)[on], getattr(got, name)[on]
        assert torch.equal(a.nan_to_num(7e9), b.nan_to_num(7e9)), name
    return got


@few(8)
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("options", PAIRS.values(), ids=PAIRS)
def test_every_filter_and_pair_of_filters(options, kind):
    for dtype in (*LOW, torch.float64):
        assert_decides(*case(options, kind, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_published_generation_config(dtype):
    """A long vocabulary, flat and sharp rows, and as many pieces as top-k and fewer."""
    for vocab, top_k in ((4099, 20), (4099, 5), (5003, 700), (30011, 64)):
        logits, pool, slots = case(QWEN | {"top_k": top_k}, "random", dtype, vocab, every=1)
        logits *= torch.logspace(-0.5, 0.7, pool.rows)[:, None]
        assert_decides(logits, pool, slots)


def one_row(vocab, dtype=torch.float32, slots=3, **options):
    """Roots of some slots, of which the first has the options."""
    made = Slots.empty(slots, vocab, 30, 4)
    made.live[:], made.group[:], made.max_new[:] = True, 0, 30
    made.sample[:], made.key[:] = torch.arange(slots), 77
    for name, value in options.items():
        getattr(made, name)[0] = value
    return torch.empty(slots, vocab, dtype=dtype), roots(made, slots), made


def below(x, level):
    """One likely token, and all others at one level."""
    return x.fill_(level).index_fill_(1, torch.tensor([3]), 0)


BEYOND_A_HEAD = {
    "a long head": (dict(top_p=0.9), lambda x: x.fill_(0)),
    "many ties": (dict(top_k=5), lambda x: x.fill_(0)),
    "more of top-k than a head has": (dict(top_k=1025), lambda x: below(x, -3)),
    "top-p below the head": (dict(top_p=0.999), lambda x: below(x, -11.2)),
    "min-p below the head": (dict(min_p=1e-6), lambda x: below(x, -11.2)),
    "typical below the head": (dict(typical_p=0.99), lambda x: below(x, -11.2)),
    "NaN": (dict(top_k=5), lambda x: below(x, -3)[0, 7].fill_(torch.nan)),
    "negative NaN": (dict(top_k=5), lambda x: below(x, -3)[0, 7].fill_(-torch.nan)),
    "infinity": (QWEN, lambda x: below(x, -3)[0, 7].fill_(torch.inf)),
    "no finite logit": (QWEN, lambda x: below(x, -3)[0].fill_(-torch.inf)),
    "NaN at a banned token": (
        dict(min_new=9, ban_ids=torch.full((16,), 7)),
        lambda x: below(x, -3)[0, 7].fill_(torch.nan),
    ),
    "all tokens banned": (
        dict(min_new=9, ban_ids=torch.full((16,), 3)),
        lambda x: below(x, -torch.inf),
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("options", "write"), BEYOND_A_HEAD.values(), ids=BEYOND_A_HEAD)
def test_rows_beyond_a_head(options, write, dtype):
    """Long heads, cuts below the head, and bad rows."""
    logits, pool, slots = one_row(20011, dtype, **options)
    write(logits)
    # the other slots' rows are ordinary
    logits[1:] = random_logits(2, 20011, scale=5.0).to(dtype)
    with no_reference():
        path.verify(logits, pool, slots)
    assert_decides(logits, pool, slots)


@DTYPES
def test_log_sums(dtype):
    x = random_logits(7, 4099).to(dtype)
    got, want, exact = log_sum(x), log_sum_ref(x), log_sum_ref(x.double())
    eps = torch.finfo(got.dtype).eps
    error = (want.double() - exact).abs().max()
    assert ((got.double() - exact).abs() <= 2 * error + eps * exact.abs().max()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{}, QWEN], ids=["plain", "all"])
def test_a_row_has_the_same_bits_among_any_others(options, dtype):
    logits, pool, slots = one_row(4099, dtype, slots=27)
    for name, value in options.items():
        getattr(slots, name)[:] = value
    logits.copy_(random_logits(27, 4099))
    whole = path.verify_all(logits, pool, slots)
    for n in (1, 2, 5):
        few_slots = one_row(4099, dtype, slots=n)[2]
        for name in ("sample", *options):
            getattr(few_slots, name)[:] = getattr(slots, name)[3 : 3 + n]
        few = path.verify_all(logits[3 : 3 + n].clone(), roots(few_slots, n), few_slots)
        for name in OF_ROWS:
            assert torch.equal(getattr(few, name), getattr(whole, name)[3 : 3 + n]), name


@few(5)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", PAIRS.values(), ids=PAIRS)
def test_given_tokens_have_the_bits_of_sampling(options, dtype):
    """Drawn tokens as they were drawn; others as the reference, also those that filters remove."""
    logits, pool, slots = case(options, "random", dtype)
    drawn = path.verify_all(logits, pool, slots)
    row = (pool.slot >= 0).nonzero()[:, 0]
    got = path.token_logprobs(logits, pool, slots, row, drawn.sample[row].long())
    greedy = slots.temperature[pool.slot[row].long()] == 0
    assert torch.equal(got.logprob[~greedy], drawn.logprob[row][~greedy])
    on = drawn.raw_logprob[row] != 0
    assert torch.equal(got.raw_logprob[on], drawn.raw_logprob[row][on]) and not got.bad.any()
    row, token = row.repeat_interleave(97), torch.arange(97).repeat(len(row))
    got = path.token_logprobs(logits, pool, slots, row, token)
    want = token_logprobs_ref(logits, pool, slots, row, token)
    assert torch.equal(got.logprob.isneginf(), want.logprob.isneginf())
    exact = token_logprobs_ref(logits.double(), pool, slots, row, token)
    assert_near(got, want, exact, 97)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_given_tokens_of_bad_rows(value):
    logits, pool, slots = case(QWEN, "random", torch.float32, every=1)
    logits[2, 8 if value > 0 else slice(None)] = value
    logits[5, 8] = math.nan
    row = torch.arange(7).repeat(2)
    token = torch.tensor([8] * 7 + [9] * 7)
    got = path.token_logprobs(logits, pool, slots, row, token)
    want = token_logprobs_ref(logits, pool, slots, row, token)
    assert torch.equal(got.bad, want.bad) and got.bad[5]
    assert got.raw_logprob[got.bad[row]].isnan().all()
    for a, b in zip(got[:2], want[:2], strict=True):
        a, b = a[~got.bad[row]], b[~got.bad[row]]
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_changes_are_the_reference_s():
    """Tokens of the row's own path have the penalty too."""
    logits, pool, slots = case({"repetition_penalty": 1.7}, "random", torch.float32, every=1)
    slots.seen.zero_()
    changed = row_logits(logits, torch.arange(pool.rows), pool, slots)
    deep = int(pool.depth.argmax())
    assert (changed[deep] != logits[deep]).sum() == pool.depth[deep] + 1
    assert_decides(logits, pool, slots)
