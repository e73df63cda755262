"""A row's logits as they are sampled, and its tokens by tiles.

Distances below the row's maximum, d = top - z >= 0, are used in place of scores: their bits have
the order of integers. Tiles are read from the row's list, or from all its logits if the list is not
used.
"""

import triton
import triton.language as tl

# tokens that share one maximum
GROUP = tl.constexpr(64)
INF_BITS = tl.constexpr(0x7F800000)
LAST = tl.constexpr((1 << 31) - 1)


@triton.jit
def load_logits(row, offs, STOPS: tl.constexpr):
    """Returns a row's logits as the model computed and as they are sampled; -inf beyond the row.

    row: pointer to logits [M, V], pool, slots, m, slot, vocab, words, penalty, early.
    """
    logits_ptr, pool, slots, m, slot = row[:5]
    vocab, words, penalty, early = row[5:]
    mask = offs < vocab
    ptrs = logits_ptr + m.to(tl.int64) * vocab + offs
    raw = tl.load(ptrs, mask=mask, other=float("-inf")).to(tl.float32)
    x = raw
    if penalty != 1.0:
        bits = tl.load(slots.seen + slot * words + offs // 32, mask=mask, other=0)
        seen = (bits >> (offs % 32)) & 1
        up = m
        while up >= 0:
            seen |= (offs == tl.load(pool.token + up)).to(tl.int32)
            up = tl.load(pool.parent + up)
        scaled = tl.where(raw < 0, raw * penalty, tl.div_rn(raw, penalty))
        x = tl.where(seen != 0, scaled, raw)
    if early:
        for i in range(STOPS):
            x = tl.where(offs == tl.load(slots.ban_ids + slot * STOPS + i), float("-inf"), x)
    return raw, x


@triton.jit
def distance(x, top, temperature):
    """Distance of logits x, scaled, below the row's scaled maximum `top`."""
    return top - tl.div_rn(x, temperature)


@triton.jit
def load_row(pool, slots, m):
    """Slot, generated position, whether end tokens are banned, temperature and penalty of row m."""
    slot = tl.load(pool.slot + m)
    index = tl.maximum(slot, 0)
    position = tl.load(slots.generated + index) + tl.load(pool.depth + m)
    early = position < tl.load(slots.min_new + index)
    temperature = tl.load(slots.temperature + index).to(tl.float32)
    temperature = tl.where(temperature == 0, 1.0, temperature)
    penalty = tl.load(slots.repetition_penalty + index).to(tl.float32)
    return slot, position, early, temperature, penalty


@triton.jit
def load_tile(
    start,
    listed,  # number of tokens in the list, -1 if it is not used
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
