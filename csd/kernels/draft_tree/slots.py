"""What the kernels of a draft read of the slots."""

import triton
import triton.language as tl

from csd.state import context_table, pool

MOST_AHEAD, MOST_LEAD = tl.constexpr(pool.MOST_AHEAD), tl.constexpr(pool.MOST_LEAD)
USUAL_HALVES = tl.constexpr(context_table.USUAL_HALVES)


@triton.jit
def live_slots(live_ptr, slots, BLOCK_S: tl.constexpr):
    """How many slots are live."""
    live = tl.zeros([BLOCK_S], tl.int32)
    for start in range(0, slots, BLOCK_S):
        offs_s = start + tl.arange(0, BLOCK_S)
        live += tl.load(live_ptr + offs_s, mask=offs_s < slots, other=0).to(tl.int32)
    return tl.sum(live, 0)


@triton.jit
def head_start(live_ptr, generated_ptr, pace_ptr, slot, slots, BLOCK_S: tl.constexpr):
    """What is added to the costs of a live slot's nodes; as `csd.state.pool.head_starts`."""
    fewest = tl.load(generated_ptr + slot)
    ahead = fewest
    for start in range(0, slots, BLOCK_S):
        offs_s = start + tl.arange(0, BLOCK_S)
        live = tl.load(live_ptr + offs_s, mask=offs_s < slots, other=0) != 0
        others = tl.load(generated_ptr + offs_s, mask=live, other=(1 << 31) - 1)
        fewest = tl.minimum(fewest, tl.min(others, 0))
    return tl.minimum(tl.load(pace_ptr + slot) * (ahead - fewest), MOST_AHEAD)


@triton.jit
def lead_cost(
    live_ptr, group_ptr, generated_ptr, step_ptr, temperature_ptr, slot, slots,
    LEAD: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """What is added to the costs of a live slot's nodes for being ahead of the last one that began
    with it; 0 where live slots are of several groups.
    """
    cost = tl.zeros((), tl.int32)
    # where noise decides, which it does in nearly every call, nothing more is read
    if (LEAD > 0) and (tl.load(temperature_ptr + slot) <= 0):
        group, step = tl.load(group_ptr + slot), tl.load(step_ptr + slot)
        ahead = tl.load(generated_ptr + slot)
        fewest, strangers = ahead, tl.zeros((), tl.int32)
        for start in range(0, slots, BLOCK_S):
            offs_s = start + tl.arange(0, BLOCK_S)
            live = tl.load(live_ptr + offs_s, mask=offs_s < slots, other=0) != 0
            theirs = tl.load(group_ptr + offs_s, mask=live, other=-1)
            strangers += tl.sum((live & (theirs != group)).to(tl.int32), 0)
            mate = live & (tl.load(step_ptr + offs_s, mask=live, other=-1) == step)
            others = tl.load(generated_ptr + offs_s, mask=mate, other=(1 << 31) - 1)
            fewest = tl.minimum(fewest, tl.min(others, 0))
        cost = tl.minimum((ahead - fewest).to(tl.int64) * LEAD, MOST_LEAD).to(tl.int32)
        cost = tl.where(strangers > 0, 0, cost)
    return cost


@triton.jit
def level_cost(generated_ptr, step_ptr, slot, LEVEL_COST: tl.constexpr, SETTLE: tl.constexpr):
    """int64, what a level costs the slot: more the fewer tokens it has committed a step."""
    if SETTLE == 0:
        cost = tl.full((), LEVEL_COST, tl.int64)
    else:
        steps = USUAL_HALVES * (tl.load(step_ptr + slot).to(tl.int64) + SETTLE)
        tokens = 2 * tl.load(generated_ptr + slot).to(tl.int64) + USUAL_HALVES * SETTLE
        cost = tl.full((), LEVEL_COST, tl.int64) * steps // tokens
        cost = tl.minimum(tl.maximum(cost, LEVEL_COST // 4), 3 * LEVEL_COST // 2)
    return cost
