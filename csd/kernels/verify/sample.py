"""Sample one row per program, from its listed head or from all its logits.

The list is used if it suffices: no chunk's list is truncated, and the cuts of top-k and top-p fall
within it. Else the same passes read the row's logits, as often as needed.
"""

import triton
import triton.language as tl

from csd.kernels.noise import gumbel32, philox_word
from csd.kernels.verify import constants
from csd.kernels.verify.draw import SAMPLE, TOP, draw_head, draw_rest, likeliest
from csd.kernels.verify.filters import head_mass, kth_smallest, tail_cut
from csd.kernels.verify.row import INF_BITS, load_row

HEAD_WIDTH = tl.constexpr(constants.HEAD_WIDTH)
MAX_HEAD = tl.constexpr(constants.MAX_HEAD)


@triton.jit
def _pack(
    listed,
    m,
    head_token_ptr, head_distance_ptr, head_count_ptr, list_token_ptr, list_distance_ptr,
    SPLITS: tl.constexpr, CAP: tl.constexpr, LIST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Concatenates the lists of a row's chunks into list_token and list_distance."""
    for start in range(0, listed, BLOCK):
        # the chunk whose list a place is in, and the number of places before that list
        offs = start + tl.arange(0, BLOCK)
        chunk = tl.zeros([BLOCK], tl.int32)
        before = tl.zeros([BLOCK], tl.int32)
        end = tl.zeros((), tl.int32)
        for c in range(SPLITS):
            end += tl.load(head_count_ptr + m * SPLITS + c)
            chunk += (offs >= end).to(tl.int32)
            before = tl.where(offs >= end, end, before)
        at = (m * SPLITS + chunk).to(tl.int64) * CAP + offs - before
        mask = offs < listed
        token = tl.load(head_token_ptr + at, mask=mask, other=0)
        d = tl.load(head_distance_ptr + at, mask=mask, other=0.0)
        tl.store(list_token_ptr + m * LIST + offs, token, mask=mask)
        tl.store(list_distance_ptr + m * LIST + offs, d, mask=mask)
    # threads load what other threads have stored
    tl.debug_barrier()


@triton.jit(do_not_specialize=["words"])
def _sample_kernel(
    logits_ptr,  # [M, V]
    token_ptr,  # [M] int32
    parent_ptr,  # [M] int32
    slot_ptr,  # [M] int32
    depth_ptr,  # [M] int32
    key_ptr,  # [S] int64
    index_ptr,  # [S] int32, the slot's sample
    generated_ptr,  # [S] int32
    min_new_ptr,  # [S] int32
    temperature_ptr,  # [S] float64
    penalty_ptr,  # [S] float64
    top_k_ptr,  # [S] int32
    top_p_ptr,  # [S] float64
    min_p_ptr,  # [S] float64
    seen_ptr,  # [S, words] int32
    ban_ids_ptr,  # [S, STOPS] int32
    top_ptr,  # [M, SPLITS] float32
    raw_top_ptr,  # [M, SPLITS] float32
    raw_sum_ptr,  # [M, SPLITS] float32
    head_token_ptr,  # [M, SPLITS, CAP] int32
    head_distance_ptr,  # [M, SPLITS, CAP] float32
    head_count_ptr,  # [M, SPLITS] int32
    rest_ptr,  # [M, SPLITS] float32
    list_token_ptr,  # [M, LIST] int32, scratch
    list_distance_ptr,  # [M, LIST] float32, scratch
    sample_ptr,  # [M] int32, out
    logprob_ptr,  # [M] float32, out
    raw_logprob_ptr,  # [M] float32, out, of every row
    top_token_ptr,  # [M, TOP] int32, out
    top_prob_ptr,  # [M, TOP] float32, out
    bad_row_ptr,  # [M] int32, out
    vocab,
    words,
    chunk,
    STOPS: tl.constexpr,
    SPLITS: tl.constexpr,
    CAP: tl.constexpr,
    LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    m = tl.program_id(0)
    offs_t = tl.arange(0, TOP)
    slot, position, early, temperature, penalty = load_row(
        slot_ptr, depth_ptr, generated_ptr, min_new_ptr, temperature_ptr, penalty_ptr, m
    )
    at = m * SPLITS + tl.arange(0, SPLITS)
    top = tl.div_rn(tl.max(tl.load(top_ptr + at), 0), temperature)
    raw_tops = tl.load(raw_top_ptr + at)
    raw_top = tl.max(raw_tops, 0)
    raw_sum = tl.sum(tl.load(raw_sum_ptr + at) * tl.exp(raw_tops - raw_top), 0)
    # NaN and +inf make the sum NaN, a row of -inf too
    good = (raw_sum > 0) & (tl.abs(top) < float("inf"))
    if (slot < 0) | (good == 0):
        # for a padding row the first kernel wrote nothing
        tl.store(sample_ptr + m, tl.where(slot < 0, -1, 0))
        tl.store(logprob_ptr + m, 0.0)
        tl.store(raw_logprob_ptr + m, tl.where(slot < 0, 0.0, float("nan")))
        tl.store(top_token_ptr + m * TOP + offs_t, tl.full([TOP], -1, tl.int32))
        tl.store(top_prob_ptr + m * TOP + offs_t, tl.zeros([TOP], tl.float32))
        tl.store(bad_row_ptr + m, (slot >= 0).to(tl.int32))
        return
    tl.store(bad_row_ptr + m, 0)

    greedy = tl.load(temperature_ptr + slot) == 0
    k = tl.load(top_k_ptr + slot)
    # in a greedy row filters could only choose among equal tokens
    k = tl.where((k < vocab) & (greedy == 0), k, 0)
    top_p = tl.where(greedy, 1.0, tl.load(top_p_ptr + slot).to(tl.float32))
    min_p = tl.where(greedy, 0.0, tl.load(min_p_ptr + slot).to(tl.float32))
    key, index = tl.load(key_ptr + slot), tl.load(index_ptr + slot)
    tail = 1 - top_p
    # a head that has all of top-k's tokens has no rest
    width = tl.where((k > 0) & (k <= MAX_HEAD), float("inf"), HEAD_WIDTH)

    row = (
        logits_ptr, token_ptr, parent_ptr, seen_ptr, ban_ids_ptr, m, slot, vocab, words, penalty,
        early,
    )  # fmt: skip
    list_at = m * LIST
    source = (row, list_token_ptr + list_at, list_distance_ptr + list_at, temperature, top)

    counts = tl.load(head_count_ptr + at)
    listed = tl.sum(counts, 0)
    rest = tl.where(k > 0, 0.0, tl.sum(tl.load(rest_ptr + at), 0))
    over = (tl.max(counts, 0) > CAP) | (listed > LIST)
    listed = tl.where(over | (listed < k), -1, listed)
    _pack(
        listed, m, head_token_ptr, head_distance_ptr, head_count_ptr, list_token_ptr,
        list_distance_ptr, SPLITS, CAP, LIST, BLOCK,
    )  # fmt: skip
    if (listed >= 0) & (top_p < 1) & (k == 0):
        head = head_mass(listed, source, STOPS, BLOCK)
        listed = tl.where(tl.div_rn(rest, head + rest) > tail, -1, listed)
    size = tl.where(listed >= 0, listed, vocab)
    rest = tl.where(listed >= 0, rest, 0.0)

    kth = tl.full((), INF_BITS, tl.int32)
    if k > 0:
        kth = kth_smallest(k, size, listed, source, STOPS, BLOCK)
    cut = tl.full((), INF_BITS, tl.int32)
    cut_token = tl.zeros((), tl.int32)
    if top_p < 1:
        cut, cut_token = tail_cut(tail, rest, kth, size, listed, source, STOPS, BLOCK)
        rest = tl.where(listed >= 0, 0.0, rest)

    cuts, place = (kth, cut, cut_token, min_p), (key, position, index, greedy)
    head, rest, best, sample, chosen, leaders = draw_head(
        rest, width, cuts, place, size, listed, source, STOPS, BLOCK
    )
    log_total = tl.log(head + rest)
    if (greedy == 0) & (rest > 0):
        word = philox_word(key, vocab, position, index, SAMPLE)
        if tl.log(rest) + gumbel32(word) > best:
            sample, chosen = draw_rest(
                rest, rest_ptr + m * SPLITS, width, cuts, place, listed, source, vocab, chunk,
                STOPS, SPLITS, BLOCK,
            )  # fmt: skip

    raw = tl.load(logits_ptr + m.to(tl.int64) * vocab + sample).to(tl.float32)
    raw = raw - (raw_top + tl.log(raw_sum))
    tl.store(sample_ptr + m, sample)
    tl.store(raw_logprob_ptr + m, raw)
    tl.store(logprob_ptr + m, tl.where(greedy, raw, chosen - log_total))
    token, prob = likeliest(leaders, log_total, greedy)
    tl.store(top_token_ptr + m * TOP + offs_t, token)
    tl.store(top_prob_ptr + m * TOP + offs_t, prob)
