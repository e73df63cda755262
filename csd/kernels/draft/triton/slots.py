"""Functions of the drafting kernels over slots, and the kernel of `sample_words`."""

import triton
import triton.language as tl

from csd.kernels.common.triton import philox_word
from csd.state import context_table, pool

MAX_PROGRESS_PENALTY = tl.constexpr(pool.MAX_PROGRESS_PENALTY)
MAX_GROUP_PENALTY = tl.constexpr(pool.MAX_GROUP_PENALTY)
USUAL_HALVES = tl.constexpr(context_table.USUAL_HALVES)


@triton.jit
def by_place(position, value, W: tl.constexpr):
    """Scatters value [C] to index place [C] of a vector [W] of zeros; places in it are distinct."""
    hit = position[:, None] == tl.arange(0, W)[None, :]
    return tl.sum(tl.where(hit, value[:, None], 0), 0)


@triton.jit
def ranks(nodes, child):
    """Ranks [C] among the children, and places of children [C] and of nodes [n] in the merged list.

    nodes: sorted. All pairs are compared, since the steps of a sort would wait for each other.
    """
    offs_c = tl.arange(0, child.shape[0])
    # [C, C] and [n, C]: along axis 0, the elements that come before
    other = child[:, None]
    before = (other < child[None, :]) | (
        (other == child[None, :]) & (offs_c[:, None] < offs_c[None, :])
    )
    rank = tl.sum(before.to(tl.int32), 0)
    position = rank + tl.sum((nodes[:, None] <= child[None, :]).to(tl.int32), 0)
    cheaper = tl.sum((other < nodes[None, :]).to(tl.int32), 0)
    return rank, position, tl.arange(0, nodes.shape[0]) + cheaper


@triton.jit
def live_slots(slots, S, BLOCK_S: tl.constexpr):
    """Number of live slots."""
    live = tl.zeros([BLOCK_S], tl.int32)
    for start in range(0, S, BLOCK_S):
        offs_s = start + tl.arange(0, BLOCK_S)
        live += tl.load(slots.live + offs_s, mask=offs_s < S, other=0).to(tl.int32)
    return tl.sum(live, 0)


@triton.jit
def slot_progress_penalty(slots, slot, S, BLOCK_S: tl.constexpr):
    """Progress penalty of a live slot, as `csd.state.pool_builder.progress_penalties`."""
    fewest = tl.load(slots.generated + slot)
    ahead = fewest
    for start in range(0, S, BLOCK_S):
        offs_s = start + tl.arange(0, BLOCK_S)
        live = tl.load(slots.live + offs_s, mask=offs_s < S, other=0) != 0
        others = tl.load(slots.generated + offs_s, mask=live, other=(1 << 31) - 1)
        fewest = tl.minimum(fewest, tl.min(others, 0))
    each = tl.load(slots.progress_penalty + slot)
    return tl.minimum(each * (ahead - fewest), MAX_PROGRESS_PENALTY)


@triton.jit
def slot_group_penalty(slots, slot, S, GROUP_PENALTY: tl.constexpr, BLOCK_S: tl.constexpr):
    """Group penalty of a live slot, for its lead over the shortest one with as many steps.

    0 if live slots belong to several groups.
    """
    cost = tl.zeros((), tl.int32)
    # slots that sample, as in nearly every call, read nothing more
    if (GROUP_PENALTY > 0) and (tl.load(slots.temperature + slot) <= 0):
        group, step = tl.load(slots.group + slot), tl.load(slots.step + slot)
        ahead = tl.load(slots.generated + slot)
        fewest, strangers = ahead, tl.zeros((), tl.int32)
        for start in range(0, S, BLOCK_S):
            offs_s = start + tl.arange(0, BLOCK_S)
            live = tl.load(slots.live + offs_s, mask=offs_s < S, other=0) != 0
            theirs = tl.load(slots.group + offs_s, mask=live, other=-1)
            strangers += tl.sum((live & (theirs != group)).to(tl.int32), 0)
            mate = live & (tl.load(slots.step + offs_s, mask=live, other=-1) == step)
            others = tl.load(slots.generated + offs_s, mask=mate, other=(1 << 31) - 1)
            fewest = tl.minimum(fewest, tl.min(others, 0))
        cost = tl.minimum((ahead - fewest).to(tl.int64) * GROUP_PENALTY, MAX_GROUP_PENALTY)
        cost = cost.to(tl.int32)
        cost = tl.where(strangers > 0, 0, cost)
    return cost


@triton.jit
def level_cost(slots, slot, LEVEL_COST: tl.constexpr, SETTLE: tl.constexpr):
    """int64: cost of a level for the slot, larger the fewer tokens it has committed per step."""
    if SETTLE == 0:
        cost = tl.full((), LEVEL_COST, tl.int64)
    else:
        steps = USUAL_HALVES * (tl.load(slots.step + slot).to(tl.int64) + SETTLE)
        tokens = 2 * tl.load(slots.generated + slot).to(tl.int64) + USUAL_HALVES * SETTLE
        cost = tl.full((), LEVEL_COST, tl.int64) * steps // tokens
        cost = tl.minimum(tl.maximum(cost, LEVEL_COST // 4), 3 * LEVEL_COST // 2)
    return cost


@triton.jit(do_not_specialize=["W"])
def sample_words_kernel(
    key_ptr,  # [S] int64
    sample_ptr,  # [S] int32
    slot_ptr,  # [F] int32
    position_ptr,  # [F] int32
    token_ptr,  # [F, W] int32
    word_ptr,  # [F, W] int64
    W,
    SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    f = tl.program_id(0).to(tl.int64)
    # [BLOCK]
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < W
    slot = tl.load(slot_ptr + f).to(tl.int64)
    key, sample = tl.load(key_ptr + slot), tl.load(sample_ptr + slot)
    token = tl.load(token_ptr + f * W + offs, mask=mask, other=0)
    word = philox_word(key, token, tl.load(position_ptr + f), sample, SAMPLE)
    tl.store(word_ptr + f * W + offs, word.to(tl.int64), mask=mask)
