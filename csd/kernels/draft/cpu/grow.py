"""Growth of all slots' draft trees level by level; see `csd/kernels/draft`.

`estimate` and `likeliest` compute and select the children of one node, `grow` runs them on every
level. All nodes are in one list: roots, then level after level, each sorted; numbers [n, 6] and
contexts [n, N].
"""

from typing import Any, NamedTuple

import numpy as np

from csd.kernels.common.noise import SAMPLE
from csd.kernels.draft.constants import EULER_GAMMA, MAX_COST, ONE, TAIL, UNIT
from csd.kernels.numba.jit import loop
from csd.kernels.numba.math import LOW, philox_word, places_in_order
from csd.kernels.table.cpu.lookup import find_entry, hash_prefix
from csd.state.context_table import ANY, PRIOR_KEY, PROMPT_BIT, SAMPLE_BITS
from csd.state.pool import HISTORY, MAX_CHILDREN, MAX_NODES, OWN, PRIOR, PROMPT, ROOT, SIBLING

# columns of a node's numbers; the parent is given by its index in the list
COST, TOKEN, SLOT, DEPTH, PARENT, SOURCE = range(6)
# initial capacity of the list beyond the roots
SOME = 256
# sizes of hash tables by token: of a node's successors, at most 128 of its group and 16 of each of
# the prior's contexts, and of the successors of all nodes of a slot in a level
OF_NODE, OF_SLOT = 512, 4096
SAMPLES = np.int64((1 << PROMPT_BIT) - 1)


class Graph(NamedTuple):
    """Contexts of the groups and of the prior, and how they are weighted."""

    tables: Any  # arrays of the groups' `Table` and of the prior's
    sizes: Any  # ways of both; entries of a part of the prior
    orders: Any  # [O], ascending, and [P], of the prior
    betas: Any  # [O + P + 1], longest context first, then the prior's, then the group as a whole
    weights: Any  # smoothing, trust, own_weight, uncoupled; smoothing and trust of the prior


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
    first,  # first entry of its part of the prior
    graph,  # `Graph`
    slot,  # whether it samples, key, sample, position of the children, source bit of its sample
    noise,  # hash table of the slot's Gumbel values in this level: tokens, values, stamps
    stamp,  # of the slot and level in `noise`
    hash_table,  # hash table, written: tokens, probabilities in units of 2^-24, sources, stamps
    mark,  # stamp of this node in `found`
    order,  # [OF_NODE], written: buckets of `found` in the order of insertion
    work,  # workspaces: [2, E], and hashes of contexts [O] and [P]
):
    """Write the probabilities of a node's successors to `hash_table`; returns their number."""
    (group, prior), sizes, orders, betas, weights = graph
    smoothing, trust, own_weight, uncoupled, prior_smoothing, prior_trust = weights
    samples, _key, _sample, _position, bit = slot
    tokens, sums, sources, stamps = hash_table
    (mine, score), codes, prior_codes = work
    count, left, O, P = 0, 1.0, orders[0].shape[0], orders[1].shape[0]
    entries = group.entry_hash.shape[0]
    hash_prefix(owner, context, orders[0], codes)
    hash_prefix(PRIOR_KEY, context, orders[1], prior_codes)
    for o in range(O + P + 1):
        entry, of_prior = whole, False
        if o < O:
            n = O - 1 - o
            entry = find_entry(group, 0, entries, sizes[0], owner, context, orders[0][n], codes[n])
        elif o < O + P:
            n, of_prior = O + P - 1 - o, True
            entry = find_entry(
                prior, first, sizes[2], sizes[1], PRIOR_KEY, context, orders[1][n], prior_codes[n]
            )
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
                stamps[bucket], tokens[bucket] = mark, token[j]
                sums[bucket], sources[bucket] = 0, source[j]
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
def likeliest(count, order, estimates, level, highest, stop_ids, chosen):
    """Select the node's MAX_CHILDREN likeliest tokens whose edges cost at most `highest`.

    level: cost of a level, part of each edge. Writes buckets of `estimates` to chosen[0], by
    falling probability, ties to smaller tokens, and edge costs to chosen[1]. Then removes tokens
    that end the sample; returns the number that is left.
    """
    tokens, sums, _, _ = estimates
    places, edges = chosen
    # lower probabilities cost more than `highest`, by more than a rounding error
    least = np.exp(-float(highest - level + 2) / UNIT) * ONE
    count_out = 0
    for i in range(count):
        bucket = order[i]
        q = min(sums[bucket], ONE)
        if q <= 0 or q < least:
            continue
        j = count_out
        while j > 0 and _before(q, tokens[bucket], places[j - 1], sums, tokens):
            j -= 1
        if j == MAX_CHILDREN:
            continue
        edge = np.int64(np.floor(-np.log(q * (1 / ONE)) * UNIT + 0.5)) + level
        if edge > highest:
            continue
        count_out = min(count_out + 1, MAX_CHILDREN)
        for k in range(count_out - 1, j, -1):
            places[k], edges[k] = places[k - 1], edges[k - 1]
        places[j], edges[j] = bucket, edge
    open_ = 0
    for i in range(count_out):
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


@loop
def grow(
    live,  # [L], slots
    budget,  # most drafted nodes of the pool
    penalty,  # [S]
    level,  # [S], cost of a level
    limits,  # highest cost of a path, most levels, most nodes of a slot to expand in a level
    graph,  # `Graph`
    slots,  # arrays of the `Slots`
):
    """Returns the list's numbers, its contexts and its length: roots and candidates for the pool.

    A root's parent is -1. Costs include the slots' penalties.
    """
    contexts, group, owner = slots.context, slots.group, slots.group_key
    (path, max_depth, frontier), (tables, sizes, orders, _, _) = limits, graph
    L, S, N = live.shape[0], group.shape[0], contexts.shape[1]
    E = max(tables[0].succ_token.shape[1], tables[1].succ_token.shape[1])
    node, context = np.empty((SOME + L, 6), np.int64), np.empty((SOME + L, N), np.int32)
    count = 0
    whole = np.empty(S, np.int64)
    any_token, one, code = np.full(N, -1, np.int32), np.ones(1, np.int64), np.empty(1, np.int64)
    any_token[0] = ANY
    for s in live:
        node[count, COST], node[count, TOKEN], node[count, SLOT] = penalty[s], contexts[s, 0], s
        node[count, DEPTH], node[count, PARENT], node[count, SOURCE] = 0, -1, ROOT
        for n in range(N):
            context[count, n] = contexts[s, n]
        key, entries = owner[group[s]], tables[0].entry_hash.shape[0]
        hash_prefix(key, any_token, one, code)
        whole[s] = find_entry(tables[0], 0, entries, sizes[0], key, any_token, 1, code[0])
        count += 1
    noise = np.empty(OF_SLOT, np.int64), np.empty(OF_SLOT), np.zeros(OF_SLOT, np.int32)
    of_node = np.empty((3, OF_NODE), np.int64)
    estimates = of_node[0], of_node[1], of_node[2], np.zeros(OF_NODE, np.int32)
    order, chosen = np.empty(OF_NODE, np.int64), np.empty((2, MAX_CHILDREN), np.int64)
    codes = np.empty(orders[0].shape[0], np.int64)
    work = np.empty((2, E)), codes, np.empty(orders[1].shape[0], np.int64)
    # nodes that cost more than the last one within the budget so far cannot enter the pool
    ceiling, stamp, mark = MAX_COST, 0, 0
    cheapest_level = MAX_COST
    for cost in level:
        cheapest_level = min(cheapest_level, cost)
    front = np.arange(L)
    for depth in range(1, max_depth + 1 if budget > 0 else 1):
        first, last = count, -1
        for f in front:
            s = node[f, SLOT]
            if slots.max_new[s] - 1 - slots.generated[s] < depth:
                continue
            if s != last:
                last, stamp = s, stamp + 1
            mark += 1
            bit, position = slots.sample[s] % SAMPLE_BITS, np.int64(slots.generated[s] + depth - 1)
            slot = slots.temperature[s] > 0, slots.key[s], slots.sample[s], position, bit
            several = estimate(
                context[f],
                owner[group[s]],
                whole[s],
                np.int64(slots.prior_part[group[s]]) * sizes[2],
                graph,
                slot,
                noise,
                stamp,
                estimates,
                mark,
                order,
                work,
            )
            highest = min(path + penalty[s], ceiling) - node[f, COST]
            children = likeliest(
                several, order, estimates, level[s], highest, slots.stop_ids[s], chosen
            )
            node, context = _with_room(node, context, count + children)
            for i in range(children):
                entry = chosen[0, i]
                node[count, COST] = node[f, COST] + chosen[1, i]
                node[count, TOKEN], node[count, SLOT] = estimates[0][entry], s
                node[count, DEPTH], node[count, PARENT] = depth, f
                node[count, SOURCE] = origin(estimates[2][entry], bit)
                context[count, 0] = estimates[0][entry]
                for n in range(1, N):
                    context[count, n] = context[f, n - 1]
                count += 1
        if count == first:
            break
        _sort(node, context, first, count)
        best = cheapest(node, L, count, S)
        if best.shape[0] >= budget:
            ceiling = min(ceiling, node[best[budget - 1], COST])
        while count > first and node[count - 1, COST] > ceiling:
            count -= 1
        front = _front(node, first, count, ceiling - cheapest_level, frontier, S)
    return node, context, count


@loop
def _with_room(node, context, count):
    """Returns numbers and contexts, copied to twice the capacity if `count` nodes do not fit."""
    if count <= node.shape[0]:
        return node, context
    more = np.empty((2 * node.shape[0], node.shape[1]), np.int64)
    contexts = np.empty((2 * node.shape[0], context.shape[1]), np.int32)
    for i in range(node.shape[0]):
        _copy(node, context, i, more, contexts, i)
    return more, contexts


@loop
def _copy(node, context, i, to_node, to_context, j):
    """Copy node i of one list to index j of another."""
    for field in range(node.shape[1]):
        to_node[j, field] = node[i, field]
    for n in range(context.shape[1]):
        to_context[j, n] = context[i, n]


@loop
def _sort(node, context, first, count):
    """Sorts a level in place by cost and token; ties keep their order, that of the parents."""
    key = np.empty(count - first, np.int64)
    for i in range(first, count):
        key[i - first] = node[i, COST] << 31 | node[i, TOKEN]
    order = places_in_order(key)
    level = np.empty((count - first, node.shape[1]), np.int64)
    contexts = np.empty((count - first, context.shape[1]), np.int32)
    for i in range(count - first):
        _copy(node, context, first + order[i], level, contexts, i)
    for i in range(count - first):
        _copy(level, contexts, i, node, context, first + i)


@loop
def cheapest(node, first, count, slots):
    """Indices of each slot's MAX_NODES - 1 cheapest nodes, sorted by cost, slot and index."""
    key = np.empty(count - first, np.int64)
    for i in range(first, count):
        key[i - first] = node[i, COST] << 16 | node[i, SLOT]
    order = places_in_order(key)
    held, selected = np.zeros(slots, np.int64), 0
    for i in order:
        s = node[first + i, SLOT]
        if held[s] < MAX_NODES - 1:
            order[selected] = first + i
            held[s] += 1
            selected += 1
    return order[:selected]


@loop
def _front(node, first, count, limit, frontier, slots):
    """Indices of a sorted level's nodes to expand, by slot, the cheapest of each slot first."""
    held = np.zeros(slots, np.int64)
    while count > first and node[count - 1, COST] > limit:
        count -= 1
    for i in range(first, count):
        s = node[i, SLOT]
        held[s] = min(held[s] + 1, frontier)
    # index of each slot's first node in the result
    start, total = np.empty(slots, np.int64), 0
    for s in range(slots):
        start[s] = total
        total += held[s]
    front = np.empty(total, np.int64)
    for i in range(first, count):
        s = node[i, SLOT]
        if held[s]:
            front[start[s]] = i
            start[s] += 1
            held[s] -= 1
    return front
