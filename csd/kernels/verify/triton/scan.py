"""The two reads of the logits: maxima and sums, then the list of every row's head.

A row is cut into SPLITS chunks of neighbouring tokens, one program each. The first read computes
maxima and sums of every chunk, and of every group of 64 tokens. The second lists the head in token
order, and reads only the groups of its chunk that contain some of the head.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from csd.kernels.verify import constants
from csd.kernels.verify.triton.rows import GROUP, INF_BITS, distance, load_logits, load_row
from csd.state.record import named, tensor

HEAD_WIDTH = tl.constexpr(constants.HEAD_WIDTH)
MAX_HEAD = tl.constexpr(constants.MAX_HEAD)
# exp(x) is 2^(x log2 e), for which a GPU has one instruction
LOG2E = tl.constexpr(1.4426950408889634)
# neighbouring tokens that one lane reads at once
OCTET = tl.constexpr(8)
# equal ranges of distance in which the listed tokens of a filtered row are counted
BINS = tl.constexpr(1024)


@triton.jit
def is_cut(slots, slot, vocab):
    """True if top-k or top-p may cut a row of the slot."""
    k = tl.load(slots.top_k + slot)
    cut = ((k > 0) & (k < vocab)) | (tl.load(slots.top_p + slot).to(tl.float32) < 1)
    return cut & (tl.load(slots.temperature + slot) != 0)


@triton.jit
def bins_per_unit(width):
    """Bins per unit of distance if the head is as wide as `width`, or has no width."""
    span = tl.where((width > 0) & (width < float("inf")), width, HEAD_WIDTH)
    return tl.div_rn(tl.full((), BINS, tl.float32), span)


@triton.jit
def bin_of(d, per_unit):
    """Bins of distances d, in their order; all beyond the others are in the last."""
    return tl.minimum(d * per_unit, BINS - 1).to(tl.int32)


@triton.jit
def _scan_chunk(
    row, begin, end, of_groups, STOPS: tl.constexpr, BLOCK: tl.constexpr, PLAIN: tl.constexpr
):
    """Returns the largest logit as sampled, the model's largest, and its sum of exp(logit - that).

    PLAIN: the model's logits are sampled unchanged, and the loop has room for many of them.
    """
    logits_ptr, m, vocab = row[0], row[3], row[5]
    group_top_ptr, group_sum_ptr, groups, per_unit = of_groups
    # each lane has its own maxima and sums, so that no load waits for a reduction
    LANES: tl.constexpr = BLOCK // OCTET
    tops = tl.full([LANES], float("-inf"), tl.float32)
    raw_tops = tl.full([LANES], float("-inf"), tl.float32)
    raw_sums = tl.zeros([LANES], tl.float32)
    for start in range(begin, end, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        if PLAIN:
            ptrs = logits_ptr + m.to(tl.int64) * vocab + offs
            x = tl.load(ptrs, mask=offs < vocab, other=float("-inf")).to(tl.float32)
            raw = x
        else:
            raw, x = load_logits(row, offs, STOPS)
        raw = tl.reshape(raw, [LANES, OCTET])
        higher = tl.maximum(raw_tops, tl.max(raw, 1))
        # a finite pivot keeps -inf - -inf out
        base = tl.where(higher == float("-inf"), 0.0, higher)
        raw_sums *= tl.exp2((raw_tops - base) * LOG2E)
        raw_sums += tl.sum(tl.exp2((raw - base[:, None]) * LOG2E), 1)
        raw_tops = higher
        if not PLAIN:
            tops = tl.maximum(tops, tl.max(tl.reshape(x, [LANES, OCTET]), 1))
        # [BLOCK / GROUP, GROUP]
        x = tl.reshape(x, [BLOCK // GROUP, GROUP])
        top = tl.max(x, 1)
        pivot = tl.where(top == float("-inf"), 0.0, top)
        mass = tl.sum(tl.exp2((x - pivot[:, None]) * per_unit), 1)
        g = start // GROUP + tl.arange(0, BLOCK // GROUP)
        tl.store(group_top_ptr + g, top, mask=g < groups)
        tl.store(group_sum_ptr + g, mass, mask=g < groups)
    raw_top = tl.max(raw_tops, 0)
    base = tl.where(raw_top == float("-inf"), 0.0, raw_top)
    raw_sum = tl.sum(raw_sums * tl.exp2((raw_tops - base) * LOG2E), 0)
    if PLAIN:
        return raw_top, raw_top, raw_sum
    else:
        return tl.max(tops, 0), raw_top, raw_sum


@named
class ScanParts(NamedTuple):
    """Results of the first two launches by row, and a list of a row's head for the third one.

    A row has `splits` chunks, and `groups` groups of tokens. A list has at most `cap` tokens of a
    chunk, and `list` of a row. If a filtered row has more, its tokens are counted by distance, and
    `sample_kernel` lists those up to its cut, in the memory of the chunks' lists.
    """

    top: torch.Tensor = tensor("M splits", torch.float32)  # largest logit as sampled
    raw_top: torch.Tensor = tensor("M splits", torch.float32)  # largest logit of the model
    raw_sum: torch.Tensor = tensor("M splits", torch.float32)  # sum of exp(logit - raw_top)
    # largest logit as sampled of each group, and sum of exp((logit - that) / temperature)
    group_top: torch.Tensor = tensor("M groups", torch.float32)
    group_sum: torch.Tensor = tensor("M groups", torch.float32)
    # the lists of the chunks, then that of the row
    head_token: torch.Tensor = tensor("M room")
    head_distance: torch.Tensor = tensor("M room", torch.float32)
    head_count: torch.Tensor = tensor("M splits")  # above cap if a chunk has more
    # largest distance of the head, and the number of its tokens by distance, of filtered rows
    head_width: torch.Tensor = tensor("M", torch.float32)
    bin_count: torch.Tensor = tensor("M bins")
    rest: torch.Tensor = tensor("M splits", torch.float32)  # mass of tokens that are not listed
    bad_row: torch.Tensor = tensor("M")


@triton.jit(do_not_specialize=["words", "groups"])
def scan_kernel(
    logits_ptr,  # [M, V]
    pool,
    slots,
    parts,  # out
    vocab,
    words,
    chunk,
    groups,
    STOPS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_X: tl.constexpr,  # BLOCK for rows whose logits are changed
):
    m, c = tl.program_id(0), tl.program_id(1)
    slot, _, early, temperature, penalty = load_row(pool, slots, m)
    if slot < 0:
        return
    row = (logits_ptr, pool, slots, m, slot, vocab, words, penalty, early)
    offset = m.to(tl.int64) * groups
    of_groups = (parts.group_top + offset, parts.group_sum + offset, groups, LOG2E / temperature)
    begin, end = c * chunk, tl.minimum((c + 1) * chunk, vocab)
    if (penalty == 1.0) & (early == 0):
        top, raw_top, raw_sum = _scan_chunk(row, begin, end, of_groups, STOPS, BLOCK, True)
    else:
        top, raw_top, raw_sum = _scan_chunk(row, begin, end, of_groups, STOPS, BLOCK_X, False)
    offset = m * SPLITS + c
    tl.store(parts.top + offset, top)
    tl.store(parts.raw_top + offset, raw_top)
    tl.store(parts.raw_sum + offset, raw_sum)
    if is_cut(slots, slot, vocab):
        SHARE: tl.constexpr = BINS // SPLITS
        offs_b = m * BINS + c * SHARE + tl.arange(0, SHARE)
        tl.store(parts.bin_count + offs_b, tl.zeros([SHARE], tl.int32))


@triton.jit
def kth_distance(d, k):
    """Bits of the k-th smallest of distances d, INF_BITS if there are fewer."""
    bits = d.to(tl.int32, bitcast=True)
    kth = tl.zeros((), tl.int32)
    for i in range(0, 31):
        larger = kth | (1 << (30 - i))
        kth = tl.where(tl.sum((bits < larger).to(tl.int32), 0) < k, larger, kth)
    return tl.minimum(kth, INF_BITS)


@triton.jit(do_not_specialize=["words", "groups"])
def compact_kernel(
    logits_ptr,  # [M, V]
    pool,
    slots,
    parts,  # out
    vocab,
    words,
    chunk,
    groups,
    STOPS: tl.constexpr,
    SPLITS: tl.constexpr,
    CAP: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    TILE: tl.constexpr,
):
    m, c = tl.program_id(0), tl.program_id(1)
    slot, _, early, temperature, penalty = load_row(pool, slots, m)
    if slot < 0:
        return
    top = tl.max(tl.load(parts.top + m * SPLITS + tl.arange(0, SPLITS)), 0)
    top = tl.div_rn(top, temperature)
    width = tl.full((), HEAD_WIDTH, tl.float32)
    greedy = tl.load(slots.temperature + slot) == 0
    k = tl.where(greedy, 0, tl.load(slots.top_k + slot))
    if (k > 0) & (k < vocab) & (k <= MAX_HEAD):
        # k groups have a maximum at least this high, so the k-th highest token is not below it
        offs_g = tl.arange(0, BLOCK_G)
        ptrs = parts.group_top + m.to(tl.int64) * groups + offs_g
        tops = tl.load(ptrs, mask=offs_g < groups, other=float("-inf"))
        width = kth_distance(distance(tops, top, temperature), k).to(tl.float32, bitcast=True)
    tl.store(parts.head_width + m, width)
    # with top-p, either the rest is dropped as a whole or the list is not used
    min_p = tl.load(slots.min_p + slot).to(tl.float32)
    cut = tl.load(slots.top_p + slot).to(tl.float32) < 1
    min_p = tl.where(cut | greedy, 0.0, min_p)
    # no distance if no filter needs the bins
    binned = tl.where(is_cut(slots, slot, vocab), width, -1.0)
    per_unit = bins_per_unit(width)

    row = (logits_ptr, pool, slots, m, slot, vocab, words, penalty, early)
    count = tl.zeros((), tl.int32)
    rest = tl.zeros((), tl.float32)
    base = m.to(tl.int64) * ROOM + c * CAP
    # a chunk's groups by tiles; only those with a token to be listed are read again. With min-p, a
    # group's mass is added token by token or not at all
    floor, whole = tl.where(min_p > 0, min_p, 2.0), tl.where(min_p > 0, 0.0, 1.0)
    GROUPS: tl.constexpr = BLOCK // GROUP
    first = c * chunk // GROUP
    for tile in range(first, tl.minimum(first + chunk // GROUP, groups), TILE):
        # [TILE]
        g = tile + tl.arange(0, TILE)
        ptrs = m.to(tl.int64) * groups + g
        inside = (g < groups) & (g < first + chunk // GROUP)
        highest = tl.load(parts.group_top + ptrs, mask=inside, other=float("-inf"))
        sums = tl.load(parts.group_sum + ptrs, mask=inside, other=0.0)
        nearest = distance(highest, top, temperature)
        mass = tl.exp(-nearest)
        near = ((nearest <= width) | (mass >= floor)) & (nearest < float("inf"))
        rest += tl.sum(tl.where(near, 0.0, sums * mass * whole), 0)
        rank = tl.cumsum(near.to(tl.int32), 0) - 1
        for batch in range(0, tl.sum(near.to(tl.int32), 0), GROUPS):
            # [GROUPS, TILE], then [GROUPS, GROUP], then [BLOCK]
            wanted = batch + tl.arange(0, GROUPS)[:, None]
            chosen = near[None, :] & (rank[None, :] == wanted)
            # after the end of the row if there are no more
            which = tl.min(tl.where(chosen, g[None, :], groups), 1)
            offs = which[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            _raw, x = load_logits(row, offs, STOPS)
            token = tl.reshape(offs, [BLOCK])
            d = distance(tl.reshape(x, [BLOCK]), top, temperature)
            listed = (d <= width) & (d < float("inf"))
            position = count + tl.cumsum(listed.to(tl.int32), 0) - 1
            mask = listed & (position < CAP)
            tl.store(parts.head_token + base + position, token, mask=mask)
            tl.store(parts.head_distance + base + position, d, mask=mask)
            count += tl.sum(listed.to(tl.int32), 0)
            # a mask, since a branch around the atomics spills a register
            bins = parts.bin_count + m * BINS + bin_of(d, per_unit)
            tl.atomic_add(bins, 1, mask=listed & (d <= binned), sem="relaxed")
            masses = tl.exp(-d)
            rest += tl.sum(tl.where(listed | (masses < min_p), 0.0, masses), 0)
    tl.store(parts.head_count + m * SPLITS + c, count)
    tl.store(parts.rest + m * SPLITS + c, rest)
