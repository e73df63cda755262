"""Sample one row a program, from its listed head or from all its logits.

The list is used where it says enough: no chunk of it is cut off, top-k ends within it, and top-p
does too. Else the same passes go over the row's logits, as often as it takes.
"""

import triton
import triton.language as tl

from csd.kernels import noise
from csd.kernels.largest_kernel import keep_largest
from csd.kernels.noise_kernel import gumbel32, philox_word, uniform32
from csd.kernels.verify_scan_kernel import (
    HEAD_WIDTH,
    INF_BITS,
    MAX_HEAD,
    distance,
    load_logits,
    load_row,
)
from csd.verdict import TOP as _TOP

SAMPLE, REST = tl.constexpr(noise.SAMPLE), tl.constexpr(noise.REST)
TOP = tl.constexpr(_TOP)
LAST = tl.constexpr((1 << 31) - 1)


@triton.jit
def _pack(
    listed,
    m,
    head_token_ptr, head_distance_ptr, head_count_ptr, list_token_ptr, list_distance_ptr,
    SPLITS: tl.constexpr, CAP: tl.constexpr, LIST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put the lists of a row's chunks behind each other."""
    for start in range(0, listed, BLOCK):
        # which chunk's list a place is in, and how many places come before it
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
    # what a thread stored others load
    tl.debug_barrier()


@triton.jit
def _tile(
    start,
    listed,  # how many tokens the list holds, -1 where it is not used
    source,  # a row as `load_logits` takes it, its list's tokens and distances, temperature, top
    STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Tokens and distances [BLOCK] from `start` on, in token order; distance inf beyond the end."""
    row, list_token_ptr, list_distance_ptr, temperature, top = source
    offs = start + tl.arange(0, BLOCK)
    if listed < 0:
        _, x = load_logits(row, offs, STOPS)
        token = offs
        d = distance(x, top, temperature)
    else:
        token = tl.load(list_token_ptr + offs, mask=offs < listed, other=LAST)
        d = tl.load(list_distance_ptr + offs, mask=offs < listed, other=float("inf"))
    return token, d


@triton.jit
def _passes(d, token, kth, cut, cut_token, min_p):
    """Which tokens every filter keeps."""
    bits = d.to(tl.int32, bitcast=True)
    keep = (bits <= kth) & (d < float("inf")) & (tl.exp(-d) >= min_p)
    return keep & ((bits < cut) | ((bits == cut) & (token >= cut_token)))


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
        # of a padding row the first kernel wrote nothing
        tl.store(sample_ptr + m, tl.where(slot < 0, -1, 0))
        tl.store(logprob_ptr + m, 0.0)
        tl.store(raw_logprob_ptr + m, 0.0)
        tl.store(top_token_ptr + m * TOP + offs_t, tl.full([TOP], -1, tl.int32))
        tl.store(top_prob_ptr + m * TOP + offs_t, tl.zeros([TOP], tl.float32))
        tl.store(bad_row_ptr + m, (slot >= 0).to(tl.int32))
        return
    tl.store(bad_row_ptr + m, 0)

    greedy = tl.load(temperature_ptr + slot) == 0
    k = tl.load(top_k_ptr + slot)
    # filters could only choose among equals of a greedy row
    k = tl.where((k < vocab) & (greedy == 0), k, 0)
    top_p = tl.where(greedy, 1.0, tl.load(top_p_ptr + slot).to(tl.float32))
    min_p = tl.where(greedy, 0.0, tl.load(min_p_ptr + slot).to(tl.float32))
    key, index = tl.load(key_ptr + slot), tl.load(index_ptr + slot)
    tail = 1 - top_p
    # a head of top-k's tokens has no rest
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
        head = tl.zeros((), tl.float32)
        for start in range(0, listed, BLOCK):
            _, d = _tile(start, listed, source, STOPS, BLOCK)
            head += tl.sum(tl.exp(-d), 0)
        listed = tl.where(tl.div_rn(rest, head + rest) > tail, -1, listed)
    size = tl.where(listed >= 0, listed, vocab)
    rest = tl.where(listed >= 0, rest, 0.0)

    kth = tl.full((), INF_BITS, tl.int32)
    if k > 0:
        kth = tl.zeros((), tl.int32)
        for i in range(0, 31):
            larger = kth | (1 << (30 - i))
            below = tl.zeros((), tl.int32)
            for start in range(0, size, BLOCK):
                _, d = _tile(start, listed, source, STOPS, BLOCK)
                below += tl.sum((d.to(tl.int32, bitcast=True) < larger).to(tl.int32), 0)
            kth = tl.where(below < k, larger, kth)
        kth = tl.minimum(kth, INF_BITS)

    # distance of the last token that top-p keeps, and the first of those as far that it keeps
    cut = tl.full((), INF_BITS, tl.int32)
    cut_token = tl.zeros((), tl.int32)
    if top_p < 1:
        total = rest
        last = tl.zeros((), tl.int32)
        for start in range(0, size, BLOCK):
            token, d = _tile(start, listed, source, STOPS, BLOCK)
            kept = d.to(tl.int32, bitcast=True) <= kth
            total += tl.sum(tl.where(kept, tl.exp(-d), 0.0), 0)
            last = tl.maximum(last, tl.max(tl.where(d == 0, token, 0), 0))
        cut = tl.zeros((), tl.int32)
        for i in range(0, 31):
            larger = cut | (1 << (30 - i))
            mass = rest
            for start in range(0, size, BLOCK):
                _, d = _tile(start, listed, source, STOPS, BLOCK)
                bits = d.to(tl.int32, bitcast=True)
                mass += tl.sum(tl.where((bits >= larger) & (bits <= kth), tl.exp(-d), 0.0), 0)
            cut = tl.where(tl.div_rn(mass, total) > tail, larger, cut)
        below = rest
        for start in range(0, size, BLOCK):
            _, d = _tile(start, listed, source, STOPS, BLOCK)
            bits = d.to(tl.int32, bitcast=True)
            below += tl.sum(tl.where((bits > cut) & (bits <= kth), tl.exp(-d), 0.0), 0)
        # the last of the likeliest stays whatever the rounding
        cut_token = tl.where(cut == 0, last, LAST)
        for start in range(0, size, BLOCK):
            token, d = _tile(start, listed, source, STOPS, BLOCK)
            equal = d.to(tl.int32, bitcast=True) == cut
            mass = tl.where(equal, tl.exp(-d), 0.0)
            upto = below + tl.cumsum(mass, 0)
            inside = equal & (tl.div_rn(upto, total + 0 * upto) > tail)
            cut_token = tl.minimum(cut_token, tl.min(tl.where(inside, token, LAST), 0))
            below += tl.sum(mass, 0)
        rest = tl.where(listed >= 0, 0.0, rest)

    head = tl.zeros((), tl.float32)
    best = tl.full((), float("-inf"), tl.float32)
    sample = tl.zeros((), tl.int32)
    chosen = tl.zeros((), tl.float32)
    # distance, then token: the smaller the likelier
    leaders = tl.full([TOP], -1, tl.int64)
    largest = tl.full((), LAST, tl.int64)
    for start in range(0, size, BLOCK):
        token, d = _tile(start, listed, source, STOPS, BLOCK)
        kept = _passes(d, token, kth, cut, cut_token, min_p)
        in_head = kept & (d <= width)
        mass = tl.exp(-d)
        head += tl.sum(tl.where(in_head, mass, 0.0), 0)
        if listed < 0:
            rest += tl.sum(tl.where(kept & (d > width), mass, 0.0), 0)
        noisy = -d
        if greedy == 0:
            noisy += gumbel32(philox_word(key, token, position, index, SAMPLE))
        noisy = tl.where(in_head, noisy, float("-inf"))
        most = tl.max(noisy, 0)
        who = tl.min(tl.where(in_head & (noisy == most), token, LAST), 0)
        score = -tl.sum(tl.where(in_head & (token == who), d, 0.0), 0)
        sample = tl.where(most > best, who, sample)
        chosen = tl.where(most > best, score, chosen)
        best = tl.maximum(best, most)

        near = tl.full((), INF_BITS, tl.int32) - d.to(tl.int32, bitcast=True)
        code = (near.to(tl.int64) << 31) | (largest - token)
        code = tl.where(in_head, code, -1)
        leaders = keep_largest(code, leaders, TOP)
    log_total = tl.log(head + rest)

    if (greedy == 0) & (rest > 0):
        word = philox_word(key, vocab, position, index, SAMPLE)
        if tl.log(rest) + gumbel32(word) > best:
            # inverse CDF in token order, clamped to the last token of the rest
            word = philox_word(key, 0 * vocab, position, index, REST)
            target = uniform32(word) * rest
            below = tl.zeros((), tl.float32)
            start = tl.zeros((), tl.int32)
            if listed >= 0:
                masses = tl.load(rest_ptr + at)
                last_chunk = tl.max(tl.where(masses > 0, tl.arange(0, SPLITS), 0), 0)
                for c in range(SPLITS):
                    mass_c = tl.load(rest_ptr + m * SPLITS + c)
                    on = (below + mass_c <= target) & (start == c * chunk) & (c < last_chunk)
                    below = tl.where(on, below + mass_c, below)
                    start = tl.where(on, (c + 1) * chunk, start)
            found = tl.full((), LAST, tl.int32)
            last = tl.zeros((), tl.int32)
            whole = tl.full((), -1, tl.int32)
            while (start < vocab) & (found == LAST):
                token, d = _tile(start, whole, source, STOPS, BLOCK)
                other = _passes(d, token, kth, cut, cut_token, min_p) & (d > width)
                mass = tl.where(other, tl.exp(-d), 0.0)
                upto = below + tl.cumsum(mass, 0)
                found = tl.min(tl.where(other & (upto > target), token, LAST), 0)
                last = tl.maximum(last, tl.max(tl.where(other, token, 0), 0))
                below += tl.sum(mass, 0)
                start += BLOCK
            sample = tl.where(found < LAST, found, last)
            _, x = load_logits(row, sample + tl.zeros([1], tl.int32), STOPS)
            chosen = -tl.sum(distance(x, top, temperature), 0)

    raw = tl.load(logits_ptr + m.to(tl.int64) * vocab + sample).to(tl.float32)
    raw = raw - (raw_top + tl.log(raw_sum))
    tl.store(sample_ptr + m, sample)
    tl.store(raw_logprob_ptr + m, raw)
    tl.store(logprob_ptr + m, tl.where(greedy, raw, chosen - log_total))
    # [TOP]
    near = (leaders >> 31).to(tl.int32)
    d = (tl.full((), INF_BITS, tl.int32) - near).to(tl.float32, bitcast=True)
    prob = tl.where(leaders >= 0, tl.exp(-d - log_total), 0.0)
    prob = tl.where(greedy, (offs_t == 0).to(tl.float32), prob)
    token = (largest - (leaders & LAST)).to(tl.int32)
    tl.store(top_token_ptr + m * TOP + offs_t, tl.where(prob > 0, token, -1))
    tl.store(top_prob_ptr + m * TOP + offs_t, prob)
