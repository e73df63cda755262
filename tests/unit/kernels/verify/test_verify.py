"""The verification kernels, interpreted, against the reference."""

from importlib import import_module

import pytest
import torch
from helpers.checks.equal_fields import assert_equal_fields
from helpers.kernels.tree_cases import random_logits, trees
from helpers.targets import few

from csd.kernels.verify import verify, verify_ref, verify_triton
from csd.kernels.verify.triton import launch
from csd.state.pool_builder import roots
from csd.state.slots import Slots
from csd.state.verdict import LENGTH, RUNNING, STOP

pytestmark = pytest.mark.compiled

module = import_module("csd.kernels.verify")


# of pools
ROWS = 16


def both(logits, pool, slots, run=verify_triton):
    want, exact = verify_ref(logits, pool, slots), verify_ref(logits.double(), pool, slots)
    assert_equal_fields(run(logits, pool, slots), want, exact, logits.shape[1])
    return want


def one_group(temperature=1.0, count=1, vocab=97):
    """Roots of `count` slots at their first token."""
    slots = Slots.empty(count, vocab, 30, 4)
    slots.live[:], slots.group[:], slots.max_new[:] = True, 0, 30
    slots.sample[:] = torch.arange(count)
    slots.key[:] = 0x1234567_89ABCDEF
    slots.temperature[:] = temperature
    slots.context[:] = 3
    slots.prompt_len[0], slots.group_key[0] = 5, 9
    return roots(slots, count), slots


@few(2)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_plain_sampling(poison, few_splits, seed, dtype):
    pool, slots = trees(seed, rows=ROWS)
    verdict = both(random_logits(pool.rows, 97, seed).to(dtype), pool, slots)
    assert verdict.accept_count.max() > 1


FILTERS = {
    "top-k": {"top_k": 5},
    "top-k-of-few": {"top_k": 96},
    "top-p": {"top_p": 0.8},
    "small-top-p": {"top_p": 1e-6},
    "min-p": {"min_p": 0.05},
    "small-min-p": {"min_p": 1e-6},
    "typical": {"typical_p": 0.7},
    "small-typical": {"typical_p": 0.05},
    "typical-of-top-k": {"top_k": 20, "typical_p": 0.5},
    "typical-of-top-p": {"top_p": 0.9, "typical_p": 0.8},
    "typical-of-min-p": {"min_p": 0.01, "typical_p": 0.8},
    "penalty": {"repetition_penalty": 1.3},
    "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9, "repetition_penalty": 1.1},
}


@few(3)
@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS.keys())
def test_filters(poison, few_splits, options):
    pool, slots = trees(3, count=4, rows=16, live=True)
    g = torch.Generator().manual_seed(1)
    slots.seen[:] = torch.randint(-(1 << 31), 1 << 31, slots.seen.shape, generator=g).int()
    # every other slot has the filters of `options`
    for name, value in options.items():
        getattr(slots, name)[::2] = value
    logits = random_logits(pool.rows, 97)
    # every other row has many equal values
    logits[::2] = logits[::2].round()
    both(logits, pool, slots)


def test_a_long_vocabulary(poison):
    pool, slots = trees(1, vocab=5003, rows=9, live=True)
    slots.top_k[::3], slots.top_p[1::3], slots.typical_p[2::3] = 50, 0.9, 0.8
    both(random_logits(pool.rows, 5003, scale=2.0), pool, slots)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_p": 0.999},
        {"top_k": 700},
        {"top_k": 1500, "top_p": 0.9},
        {"min_p": 0.3},
        {"typical_p": 0.7},
        {"typical_p": 0.999},
        {"top_k": 1500, "typical_p": 0.9},
    ],
    ids=[
        "plain",
        "top-p-in-the-rest",
        "top-k-past-the-list",
        "top-k-with-a-rest",
        "min-p",
        "typical",
        "typical-in-the-rest",
        "typical-of-top-k",
    ],
)
def test_what_no_list_holds(poison, monkeypatch, options):
    """Chunks with more of the head than their list takes, and cuts below the head."""
    monkeypatch.setattr(launch, "CAP", 128)
    pool, slots = one_group(count=3, vocab=2500)
    for name, value in options.items():
        getattr(slots, name)[:] = value
    logits = random_logits(3, 2500, scale=0.5)
    # one flat row, one with 300 tokens in the head of its first chunk, one with nearly no head
    logits[1, 300:] -= 14
    logits[2, 5:] -= 18
    both(logits, pool, slots)


CUTS = {
    "top-k": {"top_k": 300},
    "top-p": {"top_p": 0.8},
    "small-top-p": {"top_p": 0.1},
    "both": {"top_k": 300, "top_p": 0.8},
    "with-min-p": {"top_p": 0.9, "min_p": 0.05},
    "with-typical": {"top_p": 0.9, "typical_p": 0.8},
    "with-a-penalty": {"top_p": 0.9, "repetition_penalty": 1.1},
}


@few(3)
@pytest.mark.parametrize("room", [1600, 320], ids=["listed", "cut-listed"])
@pytest.mark.parametrize("options", CUTS.values(), ids=CUTS.keys())
def test_heads_longer_than_their_list_are_cut(poison, monkeypatch, options, room):
    """A list holds the kept tokens of a long head, or only those near the cut of top-p."""
    monkeypatch.setattr(launch, "SPLITS", 2)
    monkeypatch.setattr(launch, "CAP", room // 2)
    monkeypatch.setattr(launch, "LIST", 64)
    pool, slots = one_group(count=6, vocab=2500)
    slots.temperature[:] = torch.tensor([1.0, 0.7, 1.0, 0.7, 1.0, 0.0])
    slots.seen[:, ::3] = 0x11111111
    for name, value in options.items():
        getattr(slots, name)[:5] = value
    logits = random_logits(6, 2500, scale=0.5)
    # half with ties, one of which has equal tokens alone, and one with a rest
    logits[::2] = (8 * logits[::2]).round() / 8
    logits[2] = 1
    logits[3, 900:] -= 8
    both(logits, pool, slots)


@few(1)
@pytest.mark.parametrize("cap", [512, 0], ids=["listed", "not-listed"])
@pytest.mark.parametrize("min_p", [0, 1e-5])
def test_the_rest_is_drawn(poison, monkeypatch, cap, min_p):
    monkeypatch.setattr(launch, "CAP", cap)
    pool, slots = one_group(count=16, vocab=20000)
    slots.min_p[:], slots.key[:] = min_p, 77
    # one token, and so many below the head that they weigh a fifth of it
    logits = torch.full((16, 20000), -11.2)
    logits[:, 1::2] = -12.5
    logits[:, 1000] = 0
    verdict = both(logits, pool, slots)
    rest = verdict.sample[verdict.sample != 1000]
    assert 0 < len(rest) < 12 and len(rest.unique()) == len(rest)
    if min_p:
        assert (rest % 2 == 0).all()


def test_greedy_takes_the_smallest_of_equal_tokens(poison, few_splits):
    pool, slots = one_group(temperature=0, count=3)
    slots.top_k[1], slots.top_p[2] = 2, 0.5
    logits = random_logits(3, 97).clamp(max=5)
    verdict = both(logits, pool, slots)
    assert verdict.sample.tolist() == [(row == 5).int().argmax().item() for row in logits]
    assert verdict.top_prob[:, 0].tolist() == [1, 1, 1] and (verdict.top_token[:, 1:] == -1).all()


def test_fewer_tokens_than_top_8(poison):
    pool, slots = one_group(count=2, vocab=3)
    verdict = both(torch.tensor([[0.0, 1.0, -50.0], [-torch.inf, 2.0, -torch.inf]]), pool, slots)
    assert verdict.top_token[1].tolist() == [1] + [-1] * 7


def test_end_tokens_before_min_new(poison, few_splits):
    pool, slots = trees(2)
    slots.min_new[:] = slots.generated + 2
    slots.ban_ids[:, 0], slots.ban_ids[:, 15] = 2, 4
    logits = random_logits(pool.rows, 97)
    logits[:, 2] += 20
    verdict = both(logits, pool, slots)
    early = (pool.slot >= 0) & (pool.depth < 2)
    assert not (verdict.sample[early] == 2).any() and (verdict.sample[~early] == 2).any()


def test_stop_rules(poison, few_splits):
    seen = set()
    for seed in (2, 7):
        pool, slots = trees(seed, rows=20)
        slots.stop_ids[:, 3] = 1
        slots.max_new[::2] = slots.generated[::2] + 2
        seen |= set(both(random_logits(pool.rows, 97), pool, slots).finish.tolist())
    assert seen == {RUNNING, STOP, LENGTH}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_bad_logits_of_a_path_are_reported_by_slot(poison, few_splits, value):
    pool, slots = trees(4, rows=ROWS, live=True)
    logits = random_logits(pool.rows, 97)
    slot = int(pool.slot[9])
    root = int(pool.slot_start[slot])
    for row in (root, root + 1):
        logits[row, 50 if value != float("-inf") else slice(None)] = value
    verdict, want = verify_triton(logits, pool, slots), verify_ref(logits, pool, slots)
    for found in (verdict, want):
        assert found.bad.nonzero().tolist() == [[slot]]
        path = found.accept_row[slot][: found.accept_count[slot]].long()
        assert found.raw_logprob[path].isnan().tolist() == [m in (root, root + 1) for m in path]
    good = pool.slot != slot
    assert torch.equal(verdict.sample[good], want.sample[good])


def test_rows_beside_the_paths_may_be_bad(poison, few_splits):
    pool, slots = trees(4, rows=ROWS, live=True)
    logits = random_logits(pool.rows, 97)
    want = verify_ref(logits, pool, slots)
    off = pool.slot >= 0
    off[want.accept_row[want.accept_row >= 0].long()] = False
    assert off.any()
    logits[off] = torch.nan
    for found in (verify_triton(logits, pool, slots), verify_ref(logits, pool, slots)):
        assert torch.equal(found.accept_row, want.accept_row) and not found.bad.any()


def test_no_live_slot(poison):
    pool, slots = trees(5, live=False)
    slots.live[:] = False
    pool = roots(slots, 9)
    verdict = both(random_logits(9, 97), pool, slots)
    assert (verdict.sample == -1).all() and (verdict.accept_count == 0).all()


def test_operator():
    pool, slots = trees(0, rows=ROWS)
    logits = random_logits(pool.rows, 97)
    both(logits, pool, slots, verify)
    args = module._verify.pack(logits, pool, slots)
    torch.library.opcheck(torch.ops.csd.verify.default, tuple(args))


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(3, 97), r"logits must have shape \[30, V\], got \(3, 97\)"),
        (torch.zeros(30, 97, dtype=torch.int32), "logits must be floating point, got torch.int32"),
        (torch.zeros(97, 30).t(), "logits must be contiguous"),
        (torch.zeros(30, 200), r"slots.seen must have shape \(7, 7\), got \(7, 4\)"),
    ],
)
def test_bad_input(logits, message):
    with pytest.raises(ValueError, match=message):
        verify(logits, *trees(0))
