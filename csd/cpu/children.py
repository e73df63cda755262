"""Estimate and selection of a draft tree node's children; see `csd/kernels/draft_tree`."""

import numpy as np

from csd.cpu.compiled import loop
from csd.cpu.graph_lookup import find_entry, hash_prefix
from csd.cpu.noise import LOW, philox_word
from csd.kernels.draft_tree.constants import EULER_GAMMA, ONE, TAIL, UNIT
from csd.kernels.noise import SAMPLE
from csd.state.context_table import PRIOR_KEY, PROMPT_BIT
from csd.state.pool import HISTORY, MAX_CHILDREN, OWN, PRIOR, PROMPT, SIBLING

# sizes of hash tables by token: of a node's successors, at most 128 of its group and 16 of each of
# the prior's contexts, and of the successors of all nodes of a slot in a level
OF_NODE, OF_SLOT = 512, 4096
SAMPLES = np.int64((1 << PROMPT_BIT) - 1)


@loop
def place_of(token, tokens, stamps, stamp):
    """Bucket of a token in a hash table, or a free one for it; used buckets have `stamp`."""
    size = tokens.shape[0]
    bucket = (token * 40503) & (size - 1)
    while stamps[bucket] == stamp and tokens[bucket] != token:
        bucket = (bucket + 1) & (size - 1)
    return bucket


@loop
def estimate(
    context,  # [N], the node's, latest token first
    owner,  # key of its group
    whole,  # entry of the group as a whole, or -1
    tables,  # `Entries` of the groups and of the prior
    ways,  # of both
    orders,  # [O], ascending, and [P], of the prior
    betas,  # [O + P + 1], longest context first, then the prior's, then the group as a whole
    config,  # smoothing, trust, own_weight, uncoupled; smoothing and trust of the prior
    slot,  # whether it samples, key, sample, position of the children, source bit of its sample
    noise,  # hash table of the slot's Gumbel values in this level: tokens, values, stamps
    stamp,  # of the slot and level in `noise`
    found,  # hash table, written: tokens, probabilities in units of 2^-24, sources, stamps
    mark,  # stamp of this node in `found`
    order,  # [OF_NODE], written: buckets of `found` in the order of insertion
    work,  # workspaces: [2, E], and hashes of contexts [O] and [P]
):
    """Write the probabilities of a node's successors to `found`; returns their number."""
    group, prior = tables
    smoothing, trust, own_weight, uncoupled, prior_smoothing, prior_trust = config
    samples, _key, _sample, _position, bit = slot
    tokens, sums, sources, stamps = found
    (mine, score), codes, prior_codes = work
    count, left, O, P = 0, 1.0, orders[0].shape[0], orders[1].shape[0]
    hash_prefix(owner, context, orders[0], codes)
    hash_prefix(PRIOR_KEY, context, orders[1], prior_codes)
    for o in range(O + P + 1):
        entry, of_prior = whole, False
        if o < O:
            n = O - 1 - o
            entry = find_entry(
                group.entry_group, group.entry_hash, group.entry_tokens, ways[0], owner, context,
                orders[0][n], codes[n],
            )  # fmt: skip
        elif o < O + P:
            n, of_prior = O + P - 1 - o, True
            entry = find_entry(
                prior.entry_group, prior.entry_hash, prior.entry_tokens, ways[1], PRIOR_KEY,
                context, orders[1][n], prior_codes[n],
            )  # fmt: skip
        if entry < 0:
            continue
        table = prior if of_prior else group
        total = float(table.entry_total[entry])
        if of_prior:
            trusted = total * prior_trust / (total + prior_smoothing)
        else:
            trusted = total * trust / (total + smoothing)
        share, left = trusted * left, left * (1 - trusted)
        total = max(total, 1.0)
        token, weight = table.succ_token[entry], table.succ_weight[entry]
        source = table.succ_source[entry]
        E = token.shape[0]
        if samples:
            seen = weighted = 0.0
            for j in range(E):
                mine[j] = float(weight[j])
                seen += mine[j]
                if (source[j] >> bit) & 1:
                    mine[j] *= own_weight
                weighted += mine[j]
            scale = seen / (max(weighted, 1.0) * total)
            rest = np.log(max(1 - seen / total, TAIL)) + EULER_GAMMA
            norm = 0.0
            for j in range(E):
                mine[j] *= scale
                score[j] = 0.0
                if token[j] >= 0 and mine[j] > 0:
                    noisy = np.log(mine[j]) + _noise(np.int64(token[j]), slot, noise, stamp)
                    score[j] = np.exp(noisy * betas[o])
                norm += score[j]
            norm += np.exp(rest * betas[o])
        for j in range(E):
            if token[j] < 0:
                continue
            if samples:
                mass = share * ((1 - uncoupled) / norm * score[j] + uncoupled * mine[j])
            else:
                mass = share / total * weight[j]
            bucket = place_of(np.int64(token[j]), tokens, stamps, mark)
            if stamps[bucket] != mark:
                # a token's sources are those in the longest context that has it
                stamps[bucket], tokens[bucket], sums[bucket], sources[bucket] = (
                    mark,
                    token[j],
                    0,
                    source[j],
                )
                order[count] = bucket
                count += 1
            sums[bucket] += np.int64(np.floor(mass * ONE))
    return count


@loop
def _noise(token, slot, noise, stamp):
    """Gumbel value by which the token will be sampled, computed once per slot and level."""
    _, key, sample, position, _ = slot
    tokens, values, stamps = noise
    bucket = place_of(token, tokens, stamps, stamp)
    if stamps[bucket] != stamp:
        word = philox_word(key, token, position, sample, SAMPLE)
        u = (np.float64(LOW - word) + 0.5) * 2.0**-32
        stamps[bucket], tokens[bucket], values[bucket] = stamp, token, -np.log(-np.log(u))
    return values[bucket]


@loop
def likeliest(count, order, found, level, highest, stop_ids, chosen):
    """Select the node's MAX_CHILDREN likeliest tokens whose edges cost at most `highest`.

    level: cost of a level, part of each edge. Writes buckets of `found` to chosen[0], by falling
    probability, ties to smaller tokens, and edge costs to chosen[1]. Then removes tokens that end
    the sample; returns the number that is left.
    """
    tokens, sums, _, _ = found
    places, edges = chosen
    # lower probabilities cost more than `highest`, by more than a rounding error
    least = np.exp(-float(highest - level + 2) / UNIT) * ONE
    kept = 0
    for i in range(count):
        bucket = order[i]
        q = min(sums[bucket], ONE)
        if q <= 0 or q < least:
            continue
        j = kept
        while j > 0 and _before(q, tokens[bucket], places[j - 1], sums, tokens):
            j -= 1
        if j == MAX_CHILDREN:
            continue
        edge = np.int64(np.floor(-np.log(q * (1 / ONE)) * UNIT + 0.5)) + level
        if edge > highest:
            continue
        kept = min(kept + 1, MAX_CHILDREN)
        for k in range(kept - 1, j, -1):
            places[k], edges[k] = places[k - 1], edges[k - 1]
        places[j], edges[j] = bucket, edge
    open_ = 0
    for i in range(kept):
        stops = False
        for stop in stop_ids:
            stops |= tokens[places[i]] == stop
        if not stops:
            places[open_], edges[open_] = places[i], edges[i]
            open_ += 1
    return open_


@loop
def _before(q, token, other, sums, tokens):
    """True if `token` with probability q ranks before bucket `other`; ties to smaller tokens."""
    others = min(sums[other], ONE)
    return q > others or (q == others and token < tokens[other])


@loop
def origin(sources, bit):
    """Source of a token: OWN, SIBLING, PROMPT, HISTORY or PRIOR, the first in which it occurs."""
    if (sources >> bit) & 1:
        return OWN
    if sources & SAMPLES:
        return SIBLING
    if (sources >> PROMPT_BIT) & 1:
        return PROMPT
    # only a group's successors have a source
    return HISTORY if sources else PRIOR
