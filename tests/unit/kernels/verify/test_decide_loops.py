"""Verification along the accepted paths, and later operations, as loops: the bits of all rows."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from decide_cases import OF_PATHS, OF_ROWS, assert_same_paths, below, case, grown
from helpers.checks.equal_fields import assert_equal_fields
from helpers.kernels.tree_cases import random_logits, trees
from helpers.targets import few, pairs

pytest.importorskip("numba")

import csd
from csd.kernels.backends import loops as cpu_backend
from csd.kernels.ops import reference
from csd.kernels.verify import verify_ref
from csd.kernels.verify.advance_slots import advance_slots_ref
from csd.kernels.verify.cpu import decide
from csd.kernels.verify.cpu import path as loops
from csd.kernels.verify.snapshot import snapshot_ref
from csd.state.pool import MAX_DEPTH
from csd.state.pool_builder import roots
from csd.state.verdict import LENGTH, STOP

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)


@pairs
@DTYPES
@pytest.mark.parametrize("vocab", [97, 256, 1023])
@pytest.mark.parametrize("seed", range(5))
def test_it_decides_what_all_rows_do(poison, seed, vocab, dtype):
    logits, pool, slots = case(seed, vocab, dtype)
    # an idle slot has no rows, and a slot that is full keeps none
    slots.max_new[1] = slots.generated[1]
    assert (pool.slot_nodes == 0).any() or (pool.slot < 0).any() or seed
    got = loops.verify(logits, pool, slots)
    assert_same_paths(got, logits, pool, slots)


def test_these_slots_end_in_every_way():
    found = [loops.verify(*case(seed)) for seed in range(5)]
    assert max(int(x.accept_count.max()) for x in found) > 3
    assert {int(y) for x in found for y in x.finish} == {0, STOP, LENGTH}


@DTYPES
@pytest.mark.parametrize("shape", ["deep", "wide"])
def test_deep_and_wide_trees(poison, shape, dtype):
    """All of a chain is accepted, or its first half; of siblings any one."""
    _, slots = trees(0, count=5, rows=5, live=True)
    slots.temperature[:], slots.max_new[:] = torch.tensor([0, 0.7, 1, 1, 0]), 1 << 20
    parents = range(-1, MAX_DEPTH) if shape == "deep" else [-1] + [0] * 8 + [*range(1, 9)]
    pool = grown([*parents], slots)
    logits = random_logits(pool.rows, 97, 5, scale=1.0).to(dtype)
    drawn = loops.verify_all(logits, pool, slots).sample
    for s in range(5):
        at = int(pool.slot_start[s])
        for m in range(at + 1, at + int(pool.slot_nodes[s])):
            right = s % 2 or m - at <= 8 if shape == "deep" else m - at in (s + 1, s + 9)
            pool.token[m] = drawn[pool.parent[m]] if right else 96
    got = loops.verify(logits, pool, slots)
    assert_same_paths(got, logits, pool, slots)
    deep = shape == "deep"
    assert got.accept_count.tolist() == ([9, 17, 9, 17, 9] if deep else [3] * 5)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads_gives_the_same_bits(poison, threads, monkeypatch):
    before = torch.get_num_threads()
    logits, pool, slots = case(2, 1023, torch.bfloat16)
    want = loops.verify(logits, pool, slots)
    monkeypatch.setattr("csd.kernels.numba.threads.LEAST", 1)
    torch.set_num_threads(threads)
    try:
        assert_equal_fields(loops.verify(logits, pool, slots), want)
    finally:
        torch.set_num_threads(before)


@DTYPES
@pytest.mark.parametrize("by", [11.2, 12.5, 0.5], ids=["most", "some", "long heads"])
def test_rows_that_draw_their_rest_or_have_long_heads(poison, by, dtype):
    """Rows of some slots, or several times on a path."""
    logits, pool, slots = case(4, 65537, dtype, rows=40, live=True)
    slots.temperature[slots.temperature > 0] = 1
    below(logits, by)
    if by < 1:
        below(logits[::2], 30)
    drawn = loops.verify_all(logits, pool, slots).sample
    live = pool.slot >= 0
    assert torch.equal(drawn[live], verify_ref(logits, pool, slots).sample[live])
    # every slot's path is the chain of its first rows
    for m in range(pool.rows):
        above = int(pool.parent[m])
        if above >= 0:
            pool.token[m] = drawn[above] if above == m - 1 else 65536
    got = loops.verify(logits, pool, slots)
    kept = assert_same_paths(got, logits, pool, slots)
    of_path = kept.sample[kept.accept_row[kept.accept_row >= 0].long()]
    assert slots.count < len(of_path) and 0 < (of_path != 3).sum() < len(of_path)


def strided(logits, pool, slots):
    return torch.stack((logits, logits), 2)[:, :, 0], pool, slots


OTHER = {
    "float16": lambda x, pool, slots: (x.half(), pool, slots),
    "logits between others": strided,
    "a type of its own": lambda x, pool, slots: (
        x,
        replace(pool, parent=pool.parent.long()),
        slots,
    ),
}


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER.keys())
def test_tensors_of_other_types_and_layouts(change):
    logits, pool, slots = change(*case(1, 999, rows=12, live=True))
    got, want = loops.verify(logits, pool, slots), verify_ref(logits, pool, slots)
    for name in (*OF_PATHS, "sample"):
        a, b = getattr(got, name), getattr(want, name)
        on = want.accept_row[want.accept_row >= 0].long() if name == "sample" else slice(None)
        assert torch.equal(a[on], b[on]), name


def test_one_slot_s_options_do_not_change_the_others():
    logits, pool, slots = case(3, live=True)
    slots.temperature[:] = 0.9
    want = loops.verify(logits, pool, slots)
    for s in range(slots.count):
        others = torch.arange(slots.count) != s
        rows = (pool.slot >= 0) & (pool.slot != s)
        for field, value in (("top_k", 5), ("repetition_penalty", 1.1), ("min_new", 1 << 20)):
            other = deepcopy(slots)
            getattr(other, field)[s] = value
            got = loops.verify(logits, pool, other)
            for name in OF_PATHS:
                assert torch.equal(getattr(got, name)[others], getattr(want, name)[others])
            for name in OF_ROWS:
                assert torch.equal(getattr(got, name)[rows], getattr(want, name)[rows])
        bad = logits.clone()
        bad[pool.slot_start[s]] = torch.nan
        got = loops.verify(bad, pool, slots)
        assert got.bad.nonzero().tolist() == [[s]]
        assert torch.equal(got.sample[rows], want.sample[rows])


def test_settings_that_change_no_draw():
    """Filters of greedy slots and anything of idle ones; end tokens that may be drawn by now."""
    logits, pool, slots = case(3, live=True)
    want = loops.verify(logits, pool, slots)
    greedy = slots.temperature == 0
    slots.top_k[greedy], slots.top_p[greedy], slots.min_p[greedy] = 5, 0.5, 0.1
    slots.min_new[:], slots.ban_ids[:, 0] = slots.generated, 1
    assert_equal_fields(loops.verify(logits, pool, slots), want)
    idle = 2
    pool.slot_nodes[idle], pool.slot[pool.slot == idle] = 0, -1
    slots.repetition_penalty[idle], slots.top_k[idle] = 1.3, 5
    slots.temperature[idle] = 0.7
    assert_same_paths(loops.verify(logits, pool, slots), logits, pool, slots)


def test_bad_rows_beside_the_paths_are_not_seen():
    logits, pool, slots = case(2, live=True)
    want = loops.verify(logits, pool, slots)
    on = want.accept_row[want.accept_row >= 0].long()
    off = torch.ones(pool.rows, dtype=torch.bool).index_fill_(0, on, False)
    assert (off & (pool.slot >= 0)).any()
    logits[off] = torch.nan
    assert_equal_fields(loops.verify(logits, pool, slots), want)


def test_no_live_slot():
    logits, _, slots = case(1, live=True)
    slots.live[:] = False
    pool = roots(slots, 3)
    got = loops.verify(logits[:3], pool, slots)
    assert_same_paths(got, logits[:3], pool, slots)
    assert not got.accept_count.any()


@few(4)
@pytest.mark.parametrize(
    "with_snapshot", [(False, False), (True, False), (False, True), (True, True)]
)
@pytest.mark.parametrize("kept", [torch.float32, torch.float64], ids=str)
@DTYPES
def test_slots_advance_and_the_snapshot_is_written(poison, dtype, kept, with_snapshot):
    for seed in range(4):
        logits, pool, slots = case(seed, 97, dtype)
        slots.logprobs, slots.raw_logprobs = slots.logprobs.to(kept), slots.raw_logprobs.to(kept)
        # token 31 sits on the sign bit of its word, and a slot's last token has no place behind
        logits[::3, 31] += 20
        slots.repetition_penalty[::2] = 1.2 if seed == 3 else 1
        slots.max_new[2], slots.generated[2] = slots.tokens.shape[1], slots.tokens.shape[1] - 1
        moved = deepcopy(slots)
        verdict = loops.verify(logits, pool, moved)
        advance_slots_ref(moved, verdict)
        want = snapshot_ref(pool, verdict, *with_snapshot)
        got, *found = decide.decide(logits, pool, slots, *with_snapshot)
        assert_equal_fields(got, verdict)
        assert_equal_fields(slots, moved)
        for a, b in zip(found, want, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


def test_slots_that_loops_cannot_read_move_on():
    logits, pool, slots = case(2)
    moved = deepcopy(slots)
    slots.context = torch.stack((slots.context, slots.context), 2)[:, :, 0]
    want = loops.verify(logits, pool, moved)
    advance_slots_ref(moved, want)
    decide.decide(logits, pool, slots, False, False)
    assert_equal_fields(slots, moved)


def test_which_operations_they_stand_for():
    ops = cpu_backend()
    if "decide" not in ops.fused:
        pytest.skip("an engine on this CPU runs no loops")
    assert ops.fused["decide"].replaces == (ops.verify, ops.advance_slots, ops.snapshot)
    assert ops.verify is loops.verify and ops.advance_slots is reference().advance_slots


@pytest.fixture(scope="module")
def engines(checkpoint):
    """An engine that verifies paths and decides in one call, and one that verifies all rows."""
    with (
        csd.Engine(checkpoint("llama"), max_slots=5) as together,
        csd.Engine(checkpoint("llama"), max_slots=5) as apart,
    ):
        if "decide" not in together.ops.fused:
            pytest.skip("an engine on this CPU runs no loops")
        fused = {"forward": apart.ops.fused["forward"]}
        apart.ops = replace(apart.ops, verify=loops.verify_all, fused=fused)
        yield together, apart


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.0}, {"top_p": 0.8}, {"min_new_tokens": 9}, {"repetition_penalty": 1.2}],
    ids=["plain", "greedy", "top-p", "end tokens later", "penalty"],
)
def test_an_engine_samples_the_same_without_them(engines, monkeypatch, options):
    found, calls = [], []
    decided = decide._finish
    monkeypatch.setattr(decide, "_finish", lambda *args: (calls.append(1), decided(*args)))
    for engine, finishes in zip(engines, (True, False), strict=True):
        calls.clear()
        found.append(
            csd.generate(
                engine, [5, 6, 7], num_samples=5, seed=1, max_new_tokens=24, budget=12, **options
            )
        )
        assert bool(calls) == finishes
    assert found[0].tokens == found[1].tokens
    assert found[0].logprobs == found[1].logprobs
    assert found[0].stats.nodes_proposed > 0
