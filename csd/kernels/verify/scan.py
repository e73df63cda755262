"""First read of the logits: maxima and sums of every chunk, and of every 64 tokens.

A row is cut into SPLITS chunks of neighbouring tokens, one program each.
"""

import triton
import triton.language as tl

from csd.kernels.verify.row import GROUP, load_logits, load_row

# exp(x) is 2^(x log2 e), for which a GPU has one instruction
LOG2E = tl.constexpr(1.4426950408889634)
# neighbouring tokens that one lane reads at once
OCTET = tl.constexpr(8)


@triton.jit
def _scan_chunk(
    row, begin, end, of_groups, STOPS: tl.constexpr, BLOCK: tl.constexpr, PLAIN: tl.constexpr
):
    """Returns the largest logit as sampled, the model's largest, and its sum of exp(logit - that).

    PLAIN: the model's logits are sampled unchanged, and the loop has room for many of them.
    """
    logits_ptr, m, vocab = row[0], row[5], row[7]
    group_top_ptr, group_sum_ptr, groups, per_unit = of_groups
    # each lane has its own maxima and sums, so that no load waits for a reduction
    LANES: tl.constexpr = BLOCK // OCTET
    tops = tl.full([LANES], float("-inf"), tl.float32)
    raw_tops = tl.full([LANES], float("-inf"), tl.float32)
    raw_sums = tl.zeros([LANES], tl.float32)
    for start in range(begin, end, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        if PLAIN:
            at = logits_ptr + m.to(tl.int64) * vocab + offs
            x = tl.load(at, mask=offs < vocab, other=float("-inf")).to(tl.float32)
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


@triton.jit(do_not_specialize=["words", "groups"])
def _scan_kernel(
    logits_ptr,  # [M, V]
    token_ptr,  # [M] int32
    parent_ptr,  # [M] int32
    slot_ptr,  # [M] int32
    depth_ptr,  # [M] int32
    generated_ptr,  # [S] int32
    min_new_ptr,  # [S] int32
    temperature_ptr,  # [S] float64
    penalty_ptr,  # [S] float64
    seen_ptr,  # [S, words] int32
    ban_ids_ptr,  # [S, STOPS] int32
    top_ptr,  # [M, SPLITS] float32, out: largest logit as sampled
    raw_top_ptr,  # [M, SPLITS] float32, out: largest logit of the model
    raw_sum_ptr,  # [M, SPLITS] float32, out: sum of exp(logit - raw_top)
    group_top_ptr,  # [M, groups] float32, out: largest logit as sampled of each group
    group_sum_ptr,  # [M, groups] float32, out: sum of exp((logit - that) / temperature)
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
    slot, _, early, temperature, penalty = load_row(
        slot_ptr, depth_ptr, generated_ptr, min_new_ptr, temperature_ptr, penalty_ptr, m
    )
    if slot < 0:
        return
    row = (
        logits_ptr, token_ptr, parent_ptr, seen_ptr, ban_ids_ptr, m, slot, vocab, words, penalty,
        early,
    )  # fmt: skip
    at = m.to(tl.int64) * groups
    of_groups = (group_top_ptr + at, group_sum_ptr + at, groups, LOG2E / temperature)
    begin, end = c * chunk, tl.minimum((c + 1) * chunk, vocab)
    if (penalty == 1.0) & (early == 0):
        top, raw_top, raw_sum = _scan_chunk(row, begin, end, of_groups, STOPS, BLOCK, True)
    else:
        top, raw_top, raw_sum = _scan_chunk(row, begin, end, of_groups, STOPS, BLOCK_X, False)
    at = m * SPLITS + c
    tl.store(top_ptr + at, top)
    tl.store(raw_top_ptr + at, raw_top)
    tl.store(raw_sum_ptr + at, raw_sum)
