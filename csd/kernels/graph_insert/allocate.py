"""Allocate entries for new contexts, in the order of keys: the third launch."""

import triton
import triton.language as tl

from csd.kernels.graph_insert import constants

MAX_AGE = tl.constexpr(constants.MAX_AGE)


@triton.jit
def _free_entries(
    want,  # [B] bucket in which the key needs an entry, or -1
    rank,  # [B] number of earlier keys that need an entry in this bucket
    now,
    entry_group_ptr,  # [C] int64
    entry_total_ptr,  # [C] int32
    entry_stamp_ptr,  # [C] int32
    live_groups_ptr,  # [G] int64
    groups,
    WAYS: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """[B]: the entry that each key gets, -1 if none is left."""
    # [B, WAYS]
    way = tl.arange(0, WAYS)[None, :]
    wants = (want >= 0)[:, None]
    at = want[:, None] * WAYS + way
    group = tl.load(entry_group_ptr + at, mask=wants, other=-1)
    total = tl.load(entry_total_ptr + at, mask=wants, other=0)
    stamp = tl.load(entry_stamp_ptr + at, mask=wants, other=0)
    # [BLOCK_G, B * WAYS]: the entries are spread over threads, so that groups need no reduction
    entries: tl.constexpr = group.shape[0] * WAYS
    groups_of = tl.reshape(group, [1, entries])
    found = tl.zeros([BLOCK_G, entries], tl.int32)
    for start in range(0, groups, BLOCK_G):
        offs_g = start + tl.arange(0, BLOCK_G)[:, None]
        live = tl.load(live_groups_ptr + offs_g, mask=offs_g < groups, other=-1)
        found |= (groups_of == live).to(tl.int32)
    alive = (tl.reshape(tl.max(found, 0), group.shape) > 0) & (group >= 0)
    # empty and dead entries first, then the lightest, then the oldest; touched ones are kept
    age = tl.minimum(now - stamp, MAX_AGE).to(tl.int64)
    busy = tl.full((), 1 << 62, tl.int64)
    cost = (total.to(tl.int64) << 30) | ((tl.full((), MAX_AGE, tl.int64) - age) << 4)
    cost = tl.where(alive, tl.where(stamp == now, busy, cost) | way, (way - WAYS).to(tl.int64))
    # [B, WAYS, WAYS]
    place = tl.sum((cost[:, None, :] < cost[:, :, None]).to(tl.int32), 2)
    mine = (place == rank[:, None]) & (cost < busy) & wants
    return tl.max(tl.where(mine, at, -1), 1)


@triton.jit(do_not_specialize=["keys", "groups"])
def _allocate_kernel(
    want_ptr,  # [K] int32
    entry_group_ptr,  # [C] int64
    entry_total_ptr,  # [C] int32
    entry_stamp_ptr,  # [C] int32
    live_groups_ptr,  # [G] int64
    now_ptr,  # [1] int32
    dropped_ptr,  # [1] int64
    place_ptr,  # [K] int32, out for keys that need an entry: this, -1 if none is left
    keys,
    groups,
    WAYS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    # [BLOCK_K]
    key = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    want = tl.load(want_ptr + key, mask=key < keys, other=-1)
    if tl.max(want, 0) < 0:
        return
    # [BLOCK_J, BLOCK_K]
    rank = tl.zeros([BLOCK_J, BLOCK_K], tl.int32)
    for j in range(0, (tl.program_id(0) + 1) * BLOCK_K, BLOCK_J):
        # [BLOCK_J, 1]
        other = j + tl.arange(0, BLOCK_J)[:, None]
        other_want = tl.load(want_ptr + other, mask=other < keys, other=-1)
        rank += ((other_want == want[None, :]) & (other < key[None, :])).to(tl.int32)
    room = _free_entries(
        want, tl.sum(rank, 0), tl.load(now_ptr), entry_group_ptr, entry_total_ptr,
        entry_stamp_ptr, live_groups_ptr, groups, WAYS, BLOCK_G,
    )  # fmt: skip
    tl.store(place_ptr + key, room, mask=want >= 0)
    lost = tl.sum(((want >= 0) & (room < 0)).to(tl.int64), 0)
    if lost > 0:
        # integers: the sum does not depend on the order of programs
        tl.atomic_add(dropped_ptr, lost)
