"""Sample one row per program, from its listed head or from all its logits.

The list is used if it suffices: no chunk's list is truncated, and the cuts of the filters fall
within it. If it is too long, one pass over the row's logits lists the tokens up to the cut of top-k
or top-p, or only those near the cut of top-p. Else the same passes read the row's logits, as often
as needed. A cut is found bit by bit. `draw_head` finds the winner of the head, and `draw_rest` a
token of the rest. With teacher_forced, a program computes the log-probability of the token that
`sample` holds for its row, by the same instructions, so that the bits are those of sampling.
"""

import triton
import triton.language as tl

from csd.kernels.common import noise
from csd.kernels.common.triton import gumbel32, keep_largest, philox_word, uniform32
from csd.kernels.verify import constants
from csd.kernels.verify.triton.rows import (
    INF_BITS,
    LAST,
    distance,
    load_logits,
    load_row,
    load_tile,
)
from csd.kernels.verify.triton.scan import BINS, bin_of, bins_per_unit
from csd.state.verdict import TOP as _TOP

SAMPLE, REST = tl.constexpr(noise.SAMPLE), tl.constexpr(noise.REST)
TOP = tl.constexpr(_TOP)
HEAD_WIDTH = tl.constexpr(constants.HEAD_WIDTH)
MAX_HEAD = tl.constexpr(constants.MAX_HEAD)


@triton.jit
def passes(d, token, cuts):
    """Flags of the tokens that every filter keeps.

    cuts: kth, the bits of the largest distance that top-k keeps; cut and cut_token, those of the
    largest one that top-p keeps and the first token kept there; min_p; center and reach, the middle
    and the half width of the distances that typical_p keeps.
    """
    kth, cut, cut_token, min_p, center, reach = cuts
    bits = d.to(tl.int32, bitcast=True)
    keep = (bits <= kth) & (d < float("inf")) & (tl.exp(-d) >= min_p)
    keep &= tl.abs(d - center) <= reach
    return keep & ((bits < cut) | ((bits == cut) & (token >= cut_token)))


@triton.jit
def cut_bins(bin_count_ptr, k, tail, rest, width, MOST: tl.constexpr):
    """First and last bin to list so that the cut falls within the list; no bin if none suffices.

    Lists all tokens of the bins up to the cut if they are at most MOST, else for top-p alone those
    of the bins in which it may fall. A bin's mass is bounded by its tokens and its ends.
    """
    b = tl.arange(0, BINS)
    count = tl.load(bin_count_ptr + b)
    upto = tl.cumsum(count, 0)
    step = tl.div_rn(1.0, bins_per_unit(width))
    high = count * tl.exp(-step * b)
    low = high * tl.exp(-step)
    # masses from each bin on, which descend; the slack is far above the rounding of sums
    SLACK: tl.constexpr = 1.001
    most, least = tl.cumsum(high, 0, reverse=True) + rest, tl.cumsum(low, 0, reverse=True) + rest
    least_total, most_total = tl.max(least, 0), tl.max(most, 0)
    may = (most * SLACK > tail * least_total).to(tl.int32)
    must = (least > tail * most_total * SLACK).to(tl.int32)
    last = tl.maximum(tl.sum(may, 0) - 1, 0)
    first = tl.maximum(tl.sum(must, 0) - 1, 0)
    last = tl.where(k > 0, tl.sum((upto < k).to(tl.int32), 0), last)
    first = tl.where((k > 0) | (tl.sum(tl.where(b <= last, count, 0), 0) <= MOST), 0, first)
    within = tl.sum(tl.where((b >= first) & (b <= last), count, 0), 0)
    deep = (k == 0) & (rest * SLACK > tail * least_total)
    return first, tl.where((within > MOST) | deep, -1, last)


@triton.jit
def list_bins(first, last, width, source, vocab, STOPS: tl.constexpr, BLOCK: tl.constexpr):
    """Lists the tokens of some bins in token order, from all logits of the row.

    Returns their number and the masses of the tokens that are nearer and that are farther.
    """
    per_unit = bins_per_unit(width)
    whole = tl.full((), -1, tl.int32)
    count = tl.zeros((), tl.int32)
    nearer = tl.zeros((), tl.float32)
    farther = tl.zeros((), tl.float32)
    for start in range(0, vocab, BLOCK):
        token, d = load_tile(start, whole, source, STOPS, BLOCK)
        place = tl.where(d <= width, bin_of(d, per_unit), BINS)
        chosen = (place >= first) & (place <= last) & (d < float("inf"))
        position = count + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(source[1] + position, token, mask=chosen)
        tl.store(source[2] + position, d, mask=chosen)
        count += tl.sum(chosen.to(tl.int32), 0)
        mass = tl.exp(-d)
        nearer += tl.sum(tl.where(place < first, mass, 0.0), 0)
        farther += tl.sum(tl.where(place > last, mass, 0.0), 0)
    # threads load what other threads have stored
    tl.debug_barrier()
    return count, nearer, farther


@triton.jit
def head_mass(listed, source, STOPS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of exp(-distance) of the list."""
    head = tl.zeros((), tl.float32)
    for start in range(0, listed, BLOCK):
        _, d = load_tile(start, listed, source, STOPS, BLOCK)
        head += tl.sum(tl.exp(-d), 0)
    return head


@triton.jit
def kth_smallest(k, size, listed, source, STOPS: tl.constexpr, BLOCK: tl.constexpr):
    """Bits of the k-th smallest distance, INF_BITS if there are fewer."""
    kth = tl.zeros((), tl.int32)
    for i in range(0, 31):
        larger = kth | (1 << (30 - i))
        below = tl.zeros((), tl.int32)
        for start in range(0, size, BLOCK):
            _, d = load_tile(start, listed, source, STOPS, BLOCK)
            below += tl.sum((d.to(tl.int32, bitcast=True) < larger).to(tl.int32), 0)
        kth = tl.where(below < k, larger, kth)
    return tl.minimum(kth, INF_BITS)


@triton.jit
def kept_mass(rest, kth, size, listed, source, STOPS: tl.constexpr, BLOCK: tl.constexpr):
    """Mass of the tokens that top-k keeps plus `rest`, and the last of the likeliest tokens."""
    total = rest
    last = tl.zeros((), tl.int32)
    for start in range(0, size, BLOCK):
        token, d = load_tile(start, listed, source, STOPS, BLOCK)
        passing = d.to(tl.int32, bitcast=True) <= kth
        total += tl.sum(tl.where(passing, tl.exp(-d), 0.0), 0)
        last = tl.maximum(last, tl.max(tl.where(d == 0, token, 0), 0))
    return total, last


@triton.jit
def tail_cut(
    tail, nearer, rest, kth, size, listed, source, STOPS: tl.constexpr, BLOCK: tl.constexpr
):
    """Bits of the largest distance that top-p keeps, and the first token kept at that distance.

    All less likely tokens have a mass of at most `tail` together. The masses of the tokens that are
    nearer than all of the list and of those beyond it are `nearer` and `rest`.
    """
    total, last = kept_mass(nearer + rest, kth, size, listed, source, STOPS, BLOCK)
    cut = tl.zeros((), tl.int32)
    for i in range(0, 31):
        larger = cut | (1 << (30 - i))
        mass = rest
        for start in range(0, size, BLOCK):
            _, d = load_tile(start, listed, source, STOPS, BLOCK)
            bits = d.to(tl.int32, bitcast=True)
            mass += tl.sum(tl.where((bits >= larger) & (bits <= kth), tl.exp(-d), 0.0), 0)
        cut = tl.where(tl.div_rn(mass, total) > tail, larger, cut)
    below = rest
    for start in range(0, size, BLOCK):
        _, d = load_tile(start, listed, source, STOPS, BLOCK)
        bits = d.to(tl.int32, bitcast=True)
        below += tl.sum(tl.where((bits > cut) & (bits <= kth), tl.exp(-d), 0.0), 0)
    # the last of the likeliest tokens is kept, however sums are rounded
    cut_token = tl.where(cut == 0, last, LAST)
    for start in range(0, size, BLOCK):
        token, d = load_tile(start, listed, source, STOPS, BLOCK)
        equal = d.to(tl.int32, bitcast=True) == cut
        mass = tl.where(equal, tl.exp(-d), 0.0)
        upto = below + tl.cumsum(mass, 0)
        inside = equal & (tl.div_rn(upto, total + 0 * upto) > tail)
        cut_token = tl.minimum(cut_token, tl.min(tl.where(inside, token, LAST), 0))
        below += tl.sum(mass, 0)
    return cut, cut_token


@triton.jit
def kept_moments(cuts, size, listed, source, STOPS: tl.constexpr, BLOCK: tl.constexpr):
    """Mass of the tokens that all filters keep, and the sum of mass times distance."""
    total = tl.zeros((), tl.float32)
    moment = tl.zeros((), tl.float32)
    for start in range(0, size, BLOCK):
        token, d = load_tile(start, listed, source, STOPS, BLOCK)
        passing = passes(d, token, cuts)
        mass = tl.where(passing, tl.exp(-d), 0.0)
        total += tl.sum(mass, 0)
        moment += tl.sum(mass * tl.where(passing, d, 0.0), 0)
    return total, moment


@triton.jit
def typical_reach(target, cuts, size, listed, source, STOPS: tl.constexpr, BLOCK: tl.constexpr):
    """Smallest half width around the cuts' center in which kept tokens have the mass `target`."""
    center = cuts[4]
    reach = tl.zeros((), tl.int32)
    for i in range(0, 31):
        larger = reach | (1 << (30 - i))
        mass = tl.zeros((), tl.float32)
        for start in range(0, size, BLOCK):
            token, d = load_tile(start, listed, source, STOPS, BLOCK)
            near = tl.abs(d - center).to(tl.int32, bitcast=True) < larger
            mass += tl.sum(tl.where(near & passes(d, token, cuts), tl.exp(-d), 0.0), 0)
        reach = tl.where(mass < target, larger, reach)
    return tl.minimum(reach, INF_BITS).to(tl.float32, bitcast=True)


@triton.jit
def draw_head(
    rest,
    width,
    cuts,  # as `passes` takes them
    noise_of,  # key, position, sample index and whether the row is greedy
    size,
    listed,
    source,
    STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns masses of head and rest, the winner's noisy score, token and score, and the leaders.

    Leaders are the TOP likeliest tokens as codes [TOP] of distance, then token; larger: likelier.
    """
    key, position, index, greedy = noise_of
    head = tl.zeros((), tl.float32)
    best = tl.full((), float("-inf"), tl.float32)
    sample = tl.zeros((), tl.int32)
    chosen = tl.zeros((), tl.float32)
    leaders = tl.full([TOP], -1, tl.int64)
    largest = tl.full((), LAST, tl.int64)
    for start in range(0, size, BLOCK):
        token, d = load_tile(start, listed, source, STOPS, BLOCK)
        passing = passes(d, token, cuts)
        in_head = passing & (d <= width)
        mass = tl.exp(-d)
        head += tl.sum(tl.where(in_head, mass, 0.0), 0)
        if listed < 0:
            rest += tl.sum(tl.where(passing & (d > width), mass, 0.0), 0)
        noisy = -d
        if greedy == 0:
            noisy += gumbel32(philox_word(key, token, position, index, SAMPLE))
        noisy = tl.where(in_head, noisy, float("-inf"))
        best_score = tl.max(noisy, 0)
        who = tl.min(tl.where(in_head & (noisy == best_score), token, LAST), 0)
        score = -tl.sum(tl.where(in_head & (token == who), d, 0.0), 0)
        sample = tl.where(best_score > best, who, sample)
        chosen = tl.where(best_score > best, score, chosen)
        best = tl.maximum(best, best_score)

        near = tl.full((), INF_BITS, tl.int32) - d.to(tl.int32, bitcast=True)
        code = (near.to(tl.int64) << 31) | (largest - token)
        code = tl.where(in_head, code, -1)
        leaders = keep_largest(code, leaders, TOP)
    return head, rest, best, sample, chosen, leaders


@triton.jit
def draw_rest(
    rest,
    rest_ptr,  # [SPLITS] float32, of the row
    width,
    cuts,
    noise_of,
    listed,
    source,
    vocab,
    chunk,
    STOPS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns a token of the rest and its score, by inverse CDF in token order.

    The token is clamped to the last one of the rest.
    """
    key, position, index, _ = noise_of
    row, _, _, temperature, top = source
    word = philox_word(key, 0 * vocab, position, index, REST)
    target = uniform32(word) * rest
    below = tl.zeros((), tl.float32)
    start = tl.zeros((), tl.int32)
    if listed >= 0:
        masses = tl.load(rest_ptr + tl.arange(0, SPLITS))
        last_chunk = tl.max(tl.where(masses > 0, tl.arange(0, SPLITS), 0), 0)
        for c in range(SPLITS):
            mass_c = tl.load(rest_ptr + c)
            on = (below + mass_c <= target) & (start == c * chunk) & (c < last_chunk)
            below = tl.where(on, below + mass_c, below)
            start = tl.where(on, (c + 1) * chunk, start)
    drawn = tl.full((), LAST, tl.int32)
    last = tl.zeros((), tl.int32)
    whole = tl.full((), -1, tl.int32)
    while (start < vocab) & (drawn == LAST):
        token, d = load_tile(start, whole, source, STOPS, BLOCK)
        other = passes(d, token, cuts) & (d > width)
        mass = tl.where(other, tl.exp(-d), 0.0)
        upto = below + tl.cumsum(mass, 0)
        drawn = tl.min(tl.where(other & (upto > target), token, LAST), 0)
        last = tl.maximum(last, tl.max(tl.where(other, token, 0), 0))
        below += tl.sum(mass, 0)
        start += BLOCK
    sample = tl.where(drawn < LAST, drawn, last)
    _, x = load_logits(row, sample + tl.zeros([1], tl.int32), STOPS)
    return sample, -tl.sum(distance(x, top, temperature), 0)


@triton.jit
def likeliest(leaders, log_total, greedy):
    """Tokens and probabilities [TOP] of `draw_head`'s leaders, -1 and 0 if there are fewer."""
    near = (leaders >> 31).to(tl.int32)
    d = (tl.full((), INF_BITS, tl.int32) - near).to(tl.float32, bitcast=True)
    prob = tl.where(leaders >= 0, tl.exp(-d - log_total), 0.0)
    prob = tl.where(greedy, (tl.arange(0, TOP) == 0).to(tl.float32), prob)
    token = (tl.full((), LAST, tl.int64) - (leaders & LAST)).to(tl.int32)
    return tl.where(prob > 0, token, -1), prob


@triton.jit
def _pack(
    listed,
    m,
    parts,
    SPLITS: tl.constexpr,
    CAP: tl.constexpr,
    LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Concatenates the lists of a row's chunks into the row's list, behind them."""
    base = m.to(tl.int64) * (SPLITS * CAP + LIST)
    for start in range(0, listed, BLOCK):
        # the chunk whose list a place is in, and the number of places before that list
        offs = start + tl.arange(0, BLOCK)
        chunk = tl.zeros([BLOCK], tl.int32)
        before = tl.zeros([BLOCK], tl.int32)
        end = tl.zeros((), tl.int32)
        for c in range(SPLITS):
            end += tl.load(parts.head_count + m * SPLITS + c)
            chunk += (offs >= end).to(tl.int32)
            before = tl.where(offs >= end, end, before)
        offsets = base + chunk * CAP + offs - before
        mask = offs < listed
        token = tl.load(parts.head_token + offsets, mask=mask, other=0)
        d = tl.load(parts.head_distance + offsets, mask=mask, other=0.0)
        to = base + SPLITS * CAP + offs
        tl.store(parts.head_token + to, token, mask=mask)
        tl.store(parts.head_distance + to, d, mask=mask)
    # threads load what other threads have stored
    tl.debug_barrier()


@triton.jit(do_not_specialize=["words", "teacher_forced"])
def sample_kernel(
    logits_ptr,  # [M, V]
    pool,
    slots,
    parts,
    verdict,  # the fields of rows, out; the sample in if teacher_forced
    vocab,
    words,
    chunk,
    teacher_forced,  # 1 if the tokens are read, 0 if they are drawn
    STOPS: tl.constexpr,
    SPLITS: tl.constexpr,
    CAP: tl.constexpr,
    LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    m = tl.program_id(0)
    offs_t = tl.arange(0, TOP)
    slot, position, early, temperature, penalty = load_row(pool, slots, m)
    offs_c = m * SPLITS + tl.arange(0, SPLITS)
    top = tl.div_rn(tl.max(tl.load(parts.top + offs_c), 0), temperature)
    raw_tops = tl.load(parts.raw_top + offs_c)
    raw_top = tl.max(raw_tops, 0)
    raw_sum = tl.sum(tl.load(parts.raw_sum + offs_c) * tl.exp(raw_tops - raw_top), 0)
    # NaN and +inf make the sum NaN, a row of -inf too
    good = (raw_sum > 0) & (tl.abs(top) < float("inf"))
    if (slot < 0) | (good == 0):
        # for a padding row the first kernel wrote nothing
        tl.store(verdict.sample + m, tl.where(slot < 0, -1, 0))
        tl.store(verdict.logprob + m, 0.0)
        tl.store(verdict.raw_logprob + m, tl.where(slot < 0, 0.0, float("nan")))
        tl.store(verdict.top_token + m * TOP + offs_t, tl.full([TOP], -1, tl.int32))
        tl.store(verdict.top_prob + m * TOP + offs_t, tl.zeros([TOP], tl.float32))
        tl.store(parts.bad_row + m, (slot >= 0).to(tl.int32))
        return
    tl.store(parts.bad_row + m, 0)

    greedy = tl.load(slots.temperature + slot) == 0
    k = tl.load(slots.top_k + slot)
    # in a greedy row filters could only choose among equal tokens
    k = tl.where((k < vocab) & (greedy == 0), k, 0)
    top_p = tl.where(greedy, 1.0, tl.load(slots.top_p + slot).to(tl.float32))
    min_p = tl.where(greedy, 0.0, tl.load(slots.min_p + slot).to(tl.float32))
    typical_p = tl.where(greedy, 1.0, tl.load(slots.typical_p + slot).to(tl.float32))
    key, index = tl.load(slots.key + slot), tl.load(slots.sample + slot)
    tail = 1 - top_p
    # a head that has all of top-k's tokens has no rest
    width = tl.where((k > 0) & (k <= MAX_HEAD), float("inf"), HEAD_WIDTH)

    row = (logits_ptr, pool, slots, m, slot, vocab, words, penalty, early)
    counts = tl.load(parts.head_count + offs_c)
    listed = tl.sum(counts, 0)
    rest = tl.where(k > 0, 0.0, tl.sum(tl.load(parts.rest + offs_c), 0))
    over = (tl.max(counts, 0) > CAP) | (listed > LIST)
    # the lists of the chunks, then that of the row
    list_at = m.to(tl.int64) * (SPLITS * CAP + LIST) + tl.where(over, 0, SPLITS * CAP)
    source = (row, parts.head_token + list_at, parts.head_distance + list_at, temperature, top)
    nearer = tl.zeros((), tl.float32)
    filtered = over & (listed >= k) & ((k > 0) | (top_p < 1))
    listed = tl.where(over | (listed < k), -1, listed)
    _pack(listed, m, parts, SPLITS, CAP, LIST, BLOCK)
    if filtered:
        head_width = tl.load(parts.head_width + m)
        bin_count_ptr = parts.bin_count + m * BINS
        first, last = cut_bins(bin_count_ptr, k, tail, rest, head_width, SPLITS * CAP)
        if last >= 0:
            listed, nearer, farther = list_bins(
                first, last, head_width, source, vocab, STOPS, BLOCK
            )
            rest = tl.where(k > 0, 0.0, farther)
    if (listed >= 0) & (top_p < 1) & (k == 0) & (nearer == 0):
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
        cut, cut_token = tail_cut(tail, nearer, rest, kth, size, listed, source, STOPS, BLOCK)
        rest = tl.where(listed >= 0, 0.0, rest)
        # a list of the cut alone lacks the tokens that are drawn
        listed = tl.where(nearer > 0, -1, listed)
        size = tl.where(nearer > 0, vocab, size)

    center = tl.zeros((), tl.float32)
    reach = tl.full((), float("inf"), tl.float32)
    if typical_p < 1:
        # unlisted tokens count for the mean
        whole = tl.where(rest > 0, -1, listed)
        cuts = (kth, cut, cut_token, min_p, center, reach)
        total, moment = kept_moments(
            cuts, tl.where(whole >= 0, size, vocab), whole, source, STOPS, BLOCK
        )
        center = tl.div_rn(moment, total)
        if (listed >= 0) & (rest > 0):
            # the cut falls within the list if tokens nearer than all others suffice
            inner = tl.full((), HEAD_WIDTH, tl.float32) - center
            near = (kth, cut, cut_token, min_p, center, inner)
            mass, _ = kept_moments(near, size, listed, source, STOPS, BLOCK)
            listed = tl.where(mass < typical_p * total, -1, listed)
            size = tl.where(listed >= 0, listed, vocab)
        cuts = (kth, cut, cut_token, min_p, center, reach)
        reach = typical_reach(typical_p * total, cuts, size, listed, source, STOPS, BLOCK)
        rest = tl.zeros((), tl.float32)
    cuts = (kth, cut, cut_token, min_p, center, reach)
    noise_of = (key, position, index, greedy)
    head, rest, best, sample, chosen, leaders = draw_head(
        rest, width, cuts, noise_of, size, listed, source, STOPS, BLOCK
    )
    log_total = tl.log(head + rest)
    if (greedy == 0) & (rest > 0) & (teacher_forced == 0):
        word = philox_word(key, vocab, position, index, SAMPLE)
        if tl.log(rest) + gumbel32(word) > best:
            sample, chosen = draw_rest(
                rest,
                parts.rest + m * SPLITS,
                width,
                cuts,
                noise_of,
                listed,
                source,
                vocab,
                chunk,
                STOPS,
                SPLITS,
                BLOCK,
            )

    if teacher_forced != 0:
        sample = tl.load(verdict.sample + m)
        _, x = load_logits(row, sample + tl.zeros([1], tl.int32), STOPS)
        d = distance(x, top, temperature)
        chosen = tl.sum(tl.where(passes(d, sample, cuts), -d, float("-inf")), 0)

    raw = tl.load(logits_ptr + m.to(tl.int64) * vocab + sample).to(tl.float32)
    raw = raw - (raw_top + tl.log(raw_sum))
    tl.store(verdict.sample + m, sample)
    tl.store(verdict.raw_logprob + m, raw)
    tl.store(verdict.logprob + m, tl.where(greedy, raw, chosen - log_total))
    token, prob = likeliest(leaders, log_total, greedy)
    tl.store(verdict.top_token + m * TOP + offs_t, token)
    tl.store(verdict.top_prob + m * TOP + offs_t, prob)
