"""The last two of the four launches of an insert: allocate new entries, then merge all updates.

Entries for new contexts are allocated in the order of keys. One program per context then compares
all pairs of its successors, old and new, in tiles. Sums are of integers, so their order does not
matter. `claim.py` describes all four launches.
"""

import triton
import triton.language as tl

from csd.kernels.common.triton import keep_largest_sorted
from csd.kernels.table import lookup as constants
from csd.kernels.table.triton.lookup import order_sizes
from csd.state import context_table as table

MAX_AGE = tl.constexpr(constants.MAX_AGE)
MAX_TOTAL = tl.constexpr(table.MAX_TOTAL)
LAST_TOKEN = tl.constexpr((1 << 31) - 1)


@triton.jit
def _free_entries(
    want,  # [B] bucket in which the key needs an entry, or -1
    rank,  # [B] number of earlier keys that need an entry in this bucket
    now,
    table,
    live_groups_ptr,  # [G] int64
    G,
    WAYS: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """[B]: the entry that each key gets, -1 if none is left."""
    # [B, WAYS]
    way = tl.arange(0, WAYS)[None, :]
    wants = (want >= 0)[:, None]
    offsets = want[:, None] * WAYS + way
    group = tl.load(table.entry_group + offsets, mask=wants, other=-1)
    total = tl.load(table.entry_total + offsets, mask=wants, other=0)
    stamp = tl.load(table.entry_stamp + offsets, mask=wants, other=0)
    # [BLOCK_G, B * WAYS]: the entries are spread over threads, so that groups need no reduction
    entries: tl.constexpr = group.shape[0] * WAYS
    groups_of = tl.reshape(group, [1, entries])
    free = tl.zeros([BLOCK_G, entries], tl.int32)
    for start in range(0, G, BLOCK_G):
        offs_g = start + tl.arange(0, BLOCK_G)[:, None]
        live = tl.load(live_groups_ptr + offs_g, mask=offs_g < G, other=-1)
        free |= (groups_of == live).to(tl.int32)
    alive = (tl.reshape(tl.max(free, 0), group.shape) > 0) & (group >= 0)
    # empty and dead entries first, then the lightest, then the oldest; touched ones are kept
    age = tl.minimum(now - stamp, MAX_AGE).to(tl.int64)
    busy = tl.full((), 1 << 62, tl.int64)
    cost = (total.to(tl.int64) << 30) | ((tl.full((), MAX_AGE, tl.int64) - age) << 4)
    cost = tl.where(alive, tl.where(stamp == now, busy, cost) | way, (way - WAYS).to(tl.int64))
    # [B, WAYS, WAYS]
    cheaper = tl.sum((cost[:, None, :] < cost[:, :, None]).to(tl.int32), 2)
    mine = (cheaper == rank[:, None]) & (cost < busy) & wants
    return tl.max(tl.where(mine, offsets, -1), 1)


@triton.jit(do_not_specialize=["K", "G"])
def allocate_kernel(
    table,  # written: `dropped`
    keys,  # written: the place of those that need an entry, -1 if none is left
    live_groups_ptr,  # [G] int64
    K,
    G,
    WAYS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    # [BLOCK_K]
    key = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    want = tl.load(keys.want + key, mask=key < K, other=-1)
    if tl.max(want, 0) < 0:
        return
    # [BLOCK_J, BLOCK_K]
    rank = tl.zeros([BLOCK_J, BLOCK_K], tl.int32)
    for j in range(0, (tl.program_id(0) + 1) * BLOCK_K, BLOCK_J):
        # [BLOCK_J, 1]
        other = j + tl.arange(0, BLOCK_J)[:, None]
        other_want = tl.load(keys.want + other, mask=other < K, other=-1)
        rank += ((other_want == want[None, :]) & (other < key[None, :])).to(tl.int32)
    earlier, now = tl.sum(rank, 0), tl.load(keys.now)
    room = _free_entries(want, earlier, now, table, live_groups_ptr, G, WAYS, BLOCK_G)
    tl.store(keys.place + key, room, mask=want >= 0)
    lost = tl.sum(((want >= 0) & (room < 0)).to(tl.int64), 0)
    if lost > 0:
        # integers: the sum does not depend on the order of programs
        tl.atomic_add(table.dropped, lost)


@triton.jit
def _or_last(x):
    """Bitwise or over the last axis of [A, B], by halving: much faster in the interpreter."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    if B == 1:
        return tl.reshape(x, [A])
    else:
        a, b = tl.split(tl.reshape(x, [A, B // 2, 2]))
        return _or_last(a | b)


@triton.jit
def _successors(
    i,  # indices of elements: the entry's own successors, from BLOCK_E on the updates
    held_token_ptr,
    held_weight_ptr,
    update_token_ptr,
    update_weight_ptr,
    held,
    updates,
    BLOCK_E: tl.constexpr,
):
    """Loads token (-1 if there is none) and weight of the elements i."""
    own = i < held
    new = (i >= BLOCK_E) & (i - BLOCK_E < updates)
    token = tl.load(update_token_ptr + i - BLOCK_E, mask=new, other=-1)
    weight = tl.load(update_weight_ptr + i - BLOCK_E, mask=new, other=0)
    token = tl.where(own, tl.load(held_token_ptr + i, mask=own, other=-1), token)
    weight = tl.where(own, tl.load(held_weight_ptr + i, mask=own, other=0), weight)
    return tl.where(weight > 0, token, -1), weight


@triton.jit(do_not_specialize=["K"])
def merge_kernel(
    rows,
    table,  # written
    keys,
    K,
    C: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    BLOCK_O: tl.constexpr = C.BLOCK_O
    BLOCK_N: tl.constexpr = C.BLOCK_N
    key = tl.program_id(0)
    now = tl.load(keys.now)
    if key == 0:
        tl.store(table.step, now)
    # an insert without rows still counts
    entry = tl.load(keys.place + key, mask=key < K, other=-1).to(tl.int64)
    if entry < 0:
        return
    new = tl.load(keys.want + key) >= 0
    start = tl.load(keys.start + key)
    count = tl.load(keys.count + key)
    held_token_ptr = table.succ_token + entry * E
    held_weight_ptr = table.succ_weight + entry * E
    held_source_ptr = table.succ_source + entry * E
    token_ptr = keys.token + start * U
    weight_ptr = keys.weight + start * U
    bit_ptr = keys.bit + start
    held = tl.where(new, 0, E)
    updates = count * U
    elements = BLOCK_E + updates

    # best successors so far: weight, then the smaller token; -1 is none
    last_token = tl.full((), LAST_TOKEN, tl.int64)
    offs_e = tl.arange(0, BLOCK_E)
    best = tl.full([BLOCK_E], -1, tl.int64)
    for first in range(0, elements, BLOCK):
        # [1, BLOCK]
        i = first + tl.arange(0, BLOCK)[None, :]
        token, _ = _successors(
            i, held_token_ptr, held_weight_ptr, token_ptr, weight_ptr, held, updates, BLOCK_E
        )
        # [BLOCK_J, BLOCK]
        weights = tl.zeros([BLOCK_J, BLOCK], tl.int32)
        again = tl.zeros([BLOCK_J, BLOCK], tl.int32)
        for other in range(0, elements, BLOCK_J):
            # [BLOCK_J, 1]
            j = other + tl.arange(0, BLOCK_J)[:, None]
            other_token, other_weight = _successors(
                j, held_token_ptr, held_weight_ptr, token_ptr, weight_ptr, held, updates, BLOCK_E
            )
            # an entry's weights and a call's are below 2^31 together
            same = token == other_token
            weights += tl.where(same, other_weight, 0)
            again |= (same & (j < i)).to(tl.int32)
        # [BLOCK]: a token counts only at its first occurrence
        tokens = tl.reshape(token, [BLOCK])
        code = (tl.sum(weights, 0).to(tl.int64) << 31) | (last_token - tokens)
        code = tl.where((tokens >= 0) & (tl.max(again, 0) == 0), code, -1)
        if tl.max(code, 0) > tl.min(tl.where(offs_e < E, best, 1 << 62), 0):
            best = keep_largest_sorted(code, best, first > 0, E)

    # [BLOCK_E]
    token = tl.where(best >= 0, last_token - (best & LAST_TOKEN), -1).to(tl.int32)
    weight = tl.where(best >= 0, best >> 31, 0)
    # [BLOCK_E, BLOCK_J]
    source = tl.zeros([BLOCK_E, BLOCK_J], tl.int64)
    total = tl.load(table.entry_total + entry, mask=held > 0, other=0).to(tl.int64)
    for other in range(0, elements, BLOCK_J):
        i = other + tl.arange(0, BLOCK_J)[None, :]
        of_token, _ = _successors(
            i, held_token_ptr, held_weight_ptr, token_ptr, weight_ptr, held, updates, BLOCK_E
        )
        bit = tl.load(bit_ptr + (i - BLOCK_E) // U, mask=(i >= BLOCK_E) & (of_token >= 0), other=0)
        own = tl.load(held_source_ptr + i, mask=i < held, other=0)
        word = tl.where(i < held, own, tl.full((), 1, tl.int64) << bit.to(tl.int64))
        source |= tl.where(token[:, None] == of_token, word, 0)
    for other in range(0, count, BLOCK):
        offs = other + tl.arange(0, BLOCK)
        added = tl.load(keys.total + start + offs, mask=offs < count, other=0)
        total += tl.sum(added.to(tl.int64), 0)
    source = _or_last(source)
    half = (total > MAX_TOTAL).to(tl.int64)
    weight = weight >> half

    # other threads may still be reading what the entry held
    tl.debug_barrier()
    in_entry = offs_e < E
    some = weight > 0
    tl.store(held_token_ptr + offs_e, tl.where(some, token, -1), mask=in_entry)
    tl.store(held_weight_ptr + offs_e, weight.to(tl.int32), mask=in_entry)
    tl.store(held_source_ptr + offs_e, tl.where(some, source, 0), mask=in_entry)
    tl.store(table.entry_total + entry, (total >> half).to(tl.int32))
    if new:
        ORDERS: tl.constexpr = C.ORDERS
        O: tl.constexpr = len(ORDERS)
        row = key // O
        offs_o = tl.arange(0, BLOCK_O)
        size = tl.sum(tl.where(offs_o == key % O, order_sizes(ORDERS, BLOCK_O), 0), 0)
        offs_n = tl.arange(0, BLOCK_N)
        tokens = tl.load(rows.context + row * C.N + offs_n, mask=offs_n < size, other=-1)
        tl.store(table.entry_tokens + entry * C.N + offs_n, tokens, mask=offs_n < C.N)
        tl.store(table.entry_group + entry, tl.load(rows.group_key + row))
        tl.store(table.entry_hash + entry, tl.load(keys.code + key))
        tl.store(table.entry_stamp + entry, now)
