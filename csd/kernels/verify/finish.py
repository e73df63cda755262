"""End of a step's verification in one launch: descend, advance and snapshot, slot by slot.

A program follows its slot's path, advances the slot and writes what the host reads of both. Each of
the three gets the results of the previous one in registers. Log-probabilities of the path's rows
are read from memory, since the descent clears only those off the path.
"""

import triton
import triton.language as tl

from csd.kernels.advance_slots import advance_slot
from csd.kernels.snapshot.kernel import snapshot_rows, snapshot_slot
from csd.kernels.verify.descend import descend_slot


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
    penalty_ptr,  # [S] float64
    step_ptr,  # [S] int32, in and out, as generated_ptr is
    live_ptr,  # [S] bool, in and out
    context_ptr,  # [S, N] int32, in and out
    seen_ptr,  # [S, words] int32, in and out
    tokens_ptr,  # [S, tokens] int32, out
    logprobs_ptr,  # [S, tokens], out
    raw_logprobs_ptr,  # [S, tokens], out
    cost_ptr,  # [M] int32
    source_ptr,  # [M] int32
    top_token_ptr,  # [M, TOP] int32
    top_prob_ptr,  # [M, TOP] float32
    ints_ptr,  # out, as `csd.kernels.snapshot.layout`
    floats_ptr,  # out
    S,
    M,
    tokens,
    words,
    A: tl.constexpr,
    BLOCK_A: tl.constexpr,
    STOPS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOP: tl.constexpr,
    HAS_TOP: tl.constexpr,
    HAS_TREES: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    me = tl.program_id(0)
    snapshot_rows(
        me, depth_ptr, cost_ptr, source_ptr, token_ptr, parent_ptr, ints_ptr, S, M, A, TOP,
        HAS_TOP, HAS_TREES, BLOCK_R,
    )  # fmt: skip
    if me >= S:
        return
    row, token, count, finish, bad = descend_slot(
        me,
        token_ptr, parent_ptr, depth_ptr, ancestors_ptr, slot_start_ptr, slot_nodes_ptr,
        generated_ptr, max_new_ptr, temperature_ptr, stop_ids_ptr, sample_ptr, bad_row_ptr,
        logprob_ptr, raw_logprob_ptr, accept_row_ptr, accept_count_ptr, finish_ptr, bad_ptr, A,
        BLOCK_A, STOPS,
    )  # fmt: skip
    advance_slot(
        me, row, token, count, finish, logprob_ptr, raw_logprob_ptr, penalty_ptr, generated_ptr,
        step_ptr, live_ptr, context_ptr, seen_ptr, tokens_ptr, logprobs_ptr, raw_logprobs_ptr,
        tokens, words, N, BLOCK_N,
    )  # fmt: skip
    snapshot_slot(
        me, row, token, count, finish, bad, slot_start_ptr, slot_nodes_ptr, source_ptr, logprob_ptr,
        raw_logprob_ptr, top_token_ptr, top_prob_ptr, ints_ptr, floats_ptr, S, M, A, TOP, HAS_TOP,
        HAS_TREES,
    )  # fmt: skip
