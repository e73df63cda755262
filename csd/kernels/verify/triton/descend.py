"""Follow one slot's accepted path per program: the last launch of a verification.

It ends `verify`, and with the arguments of `decide` a step's verification: its program then also
advances its slot (`csd/kernels/verify/advance_slots.py`) and writes what the host reads of both
(`csd/kernels/verify/snapshot.py`). Each of the three gets the results of the previous one in
registers. Log-probabilities of the path's rows are read from memory, since the descent
clears only those off the path.
"""

import triton
import triton.language as tl

from csd.kernels.verify.triton.slots import advance_slot, snapshot_rows, snapshot_slot
from csd.state import pool, verdict

MAX_NODES = tl.constexpr(pool.MAX_NODES)
RUNNING, STOP = tl.constexpr(verdict.RUNNING), tl.constexpr(verdict.STOP)
LENGTH = tl.constexpr(verdict.LENGTH)


@triton.jit(do_not_specialize=["S", "M", "tokens", "words"])
def _finish_kernel(
    token_ptr,  # [M] int32
    parent_ptr,  # [M] int32
    depth_ptr,  # [M] int32
    ancestors_ptr,  # [M] int64
    slot_start_ptr,  # [S] int32
    slot_nodes_ptr,  # [S] int32
    generated_ptr,  # [S] int32
    max_new_ptr,  # [S] int32
    temperature_ptr,  # [S] float64
    stop_ids_ptr,  # [S, STOPS] int32
    sample_ptr,  # [M] int32
    bad_row_ptr,  # [M] int32
    logprob_ptr,  # [M] float32, in and out: 0 off a greedy path
    raw_logprob_ptr,  # [M] float32, in and out: 0 off the path
    accept_row_ptr,  # [S, A] int32, out
    accept_count_ptr,  # [S] int32, out
    finish_ptr,  # [S] int32, out
    bad_ptr,  # [S] bool, out
    A: tl.constexpr,
    BLOCK_A: tl.constexpr,
    STOPS: tl.constexpr,
    # if the launch also advances the slots and takes the snapshot
    penalty_ptr=None,  # [S] float64
    step_ptr=None,  # [S] int32, in and out, as generated_ptr then is
    live_ptr=None,  # [S] bool, in and out
    context_ptr=None,  # [S, N] int32, in and out
    seen_ptr=None,  # [S, words] int32, in and out
    tokens_ptr=None,  # [S, tokens] int32, out
    logprobs_ptr=None,  # [S, tokens], out
    raw_logprobs_ptr=None,  # [S, tokens], out
    cost_ptr=None,  # [M] int32
    source_ptr=None,  # [M] int32
    top_token_ptr=None,  # [M, TOP] int32
    top_prob_ptr=None,  # [M, TOP] float32
    ints_ptr=None,  # out, as `csd.kernels.verify.snapshot`
    floats_ptr=None,  # out
    S=None,
    M=None,
    tokens=None,
    words=None,
    N: tl.constexpr = None,
    BLOCK_N: tl.constexpr = None,
    TOP: tl.constexpr = None,
    HAS_TOP: tl.constexpr = None,
    HAS_TREES: tl.constexpr = None,
    BLOCK_R: tl.constexpr = None,
):
    """Follows the accepted path of one slot and writes its results."""
    s = tl.program_id(0)
    if ints_ptr is not None:
        fields = (depth_ptr, cost_ptr, source_ptr, token_ptr, parent_ptr)
        snapshot_rows(s, fields, ints_ptr, S, M, A, TOP, HAS_TOP, HAS_TREES, BLOCK_R)
        if s >= S:
            return
    nodes = tl.load(slot_nodes_ptr + s)
    # [MAX_NODES]
    i = tl.arange(0, MAX_NODES)
    mask = i < nodes
    row = tl.load(slot_start_ptr + s) + i
    parent = tl.load(parent_ptr + row, mask=mask, other=-1)
    drawn = tl.load(sample_ptr + parent, mask=mask & (parent >= 0), other=-1)
    match = mask & ((parent < 0) | (drawn == tl.load(token_ptr + row, mask=mask, other=-2)))
    # bits of a slot are distinct, so their sum is their union
    one = tl.full([MAX_NODES], 1, tl.int64)
    word = tl.sum(tl.where(match, one << i.to(tl.int64), 0), 0)
    ancestors = tl.load(ancestors_ptr + row, mask=mask, other=0)
    accepted = mask & ((ancestors & ~word) == 0)
    depth = tl.load(depth_ptr + row, mask=mask, other=0)

    # [MAX_NODES, BLOCK_A], then [BLOCK_A]: the accepted path, root first
    offs_a = tl.arange(0, BLOCK_A)
    here = accepted[:, None] & (depth[:, None] == offs_a[None, :])
    path_row = tl.sum(tl.where(here, row[:, None], 0), 0)
    on_path = offs_a < tl.sum(accepted.to(tl.int32), 0)
    path = tl.load(sample_ptr + path_row, mask=on_path, other=-1)
    # [BLOCK_A, STOPS]
    stop_ids = tl.load(stop_ids_ptr + s * STOPS + tl.arange(0, STOPS))
    ends = on_path & (tl.max((path[:, None] == stop_ids[None, :]).to(tl.int32), 1) > 0)
    until_end = tl.min(tl.where(ends, offs_a + 1, BLOCK_A + 1), 0)
    left = tl.load(max_new_ptr + s) - tl.load(generated_ptr + s)
    committed = tl.minimum(tl.minimum(tl.sum(on_path.to(tl.int32), 0), until_end), left)
    committed = tl.maximum(committed, 0)
    finish = tl.where(committed == left, LENGTH, RUNNING)
    finish = tl.where(until_end <= committed, STOP, finish)
    live = nodes > 0
    committed = tl.where(live, committed, 0)
    tl.store(accept_count_ptr + s, committed)
    finish = tl.where(live, finish, RUNNING)
    tl.store(finish_ptr + s, finish)
    path_row = tl.where(offs_a < committed, path_row, -1)
    tl.store(accept_row_ptr + s * A + offs_a, path_row, mask=offs_a < A)

    # rows beside the path, which no sample reaches, may be bad
    off = mask & ((accepted == 0) | (depth >= committed))
    bad = tl.max(tl.load(bad_row_ptr + row, mask=mask & (off == 0), other=0), 0) > 0
    tl.store(bad_ptr + s, bad)
    tl.store(raw_logprob_ptr + row, tl.zeros([MAX_NODES], tl.float32), mask=off)
    if tl.load(temperature_ptr + s) == 0:
        tl.store(logprob_ptr + row, tl.zeros([MAX_NODES], tl.float32), mask=off)
    if ints_ptr is not None:
        result, logprobs = (path_row, path, committed, finish), (logprob_ptr, raw_logprob_ptr)
        counts = (generated_ptr, step_ptr, live_ptr)
        texts = (context_ptr, seen_ptr, penalty_ptr)
        records = (tokens_ptr, logprobs_ptr, raw_logprobs_ptr)
        advance_slot(s, result, logprobs, counts, texts, records, tokens, words, N, BLOCK_N)
        snapshot_slot(
            s,
            result,
            bad,
            (slot_start_ptr, slot_nodes_ptr),
            source_ptr,
            logprobs,
            (top_token_ptr, top_prob_ptr),
            ints_ptr,
            floats_ptr,
            S,
            M,
            A,
            TOP,
            HAS_TOP,
            HAS_TREES,
        )
