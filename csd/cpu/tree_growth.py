"""Growth of all slots' draft trees level by level; see `csd/kernels/draft_tree`.

All nodes are in one list: roots, then level after level, each sorted; numbers [n, 6] and contexts
[n, N].
"""

import numpy as np

from csd.cpu.children import OF_NODE, OF_SLOT, estimate, likeliest, origin
from csd.cpu.compiled import loop
from csd.cpu.graph_lookup import find_entry, hash_prefix
from csd.cpu.stable_sort import places_in_order
from csd.kernels.draft_tree.constants import MAX_COST
from csd.state.context_table import ANY, SAMPLE_BITS
from csd.state.pool import MAX_CHILDREN, MAX_NODES, ROOT

# columns of a node's numbers; the parent is given by its index in the list
COST, TOKEN, SLOT, DEPTH, PARENT, SOURCE = range(6)
# initial capacity of the list beyond the roots
SOME = 256


@loop
def grow(
    live,  # [L], slots
    budget,  # most drafted nodes of the pool
    penalty,  # [S]
    path,  # highest cost of a path
    level,  # [S], cost of a level
    max_depth,
    frontier,  # most nodes of a slot to expand in a level
    tables,  # as in `estimate`, like the next four
    ways,
    orders,
    betas,
    config,
    slots,  # sampled, key, sample, generated, max_new, context, stop_ids, key of the group
):
    """Returns the list's numbers, its contexts and its length: roots and candidates for the pool.

    A root's parent is -1. Costs include the slots' penalties.
    """
    sampled, key, sample, generated, max_new, contexts, stop_ids, owner = slots
    L, S, N = live.shape[0], sampled.shape[0], contexts.shape[1]
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
        hash_prefix(owner[s], any_token, one, code)
        whole[s] = find_entry(
            tables[0].entry_group, tables[0].entry_hash, tables[0].entry_tokens, ways[0], owner[s],
            any_token, 1, code[0],
        )  # fmt: skip
        count += 1
    noise = np.empty(OF_SLOT, np.int64), np.empty(OF_SLOT), np.zeros(OF_SLOT, np.int32)
    found = (
        np.empty(OF_NODE, np.int64), np.empty(OF_NODE, np.int64), np.empty(OF_NODE, np.int64),
        np.zeros(OF_NODE, np.int32),
    )  # fmt: skip
    order, chosen = np.empty(OF_NODE, np.int64), np.empty((2, MAX_CHILDREN), np.int64)
    codes = np.empty(orders[0].shape[0], np.int64), np.empty(orders[1].shape[0], np.int64)
    work = np.empty((2, E)), codes[0], codes[1]
    # nodes that cost more than the last one within the budget so far cannot enter the pool
    ceiling, stamp, mark = MAX_COST, 0, 0
    cheapest_level = MAX_COST
    for cost in level:
        cheapest_level = min(cheapest_level, cost)
    front = np.arange(L)
    for depth in range(1, max_depth + 1):
        first, last = count, -1
        for f in front:
            s = node[f, SLOT]
            if max_new[s] - 1 - generated[s] < depth:
                continue
            if s != last:
                last, stamp = s, stamp + 1
            mark += 1
            bit = sample[s] % SAMPLE_BITS
            slot = sampled[s], key[s], sample[s], np.int64(generated[s] + depth - 1), bit
            several = estimate(
                context[f], owner[s], whole[s], tables, ways, orders, betas, config, slot, noise,
                stamp, found, mark, order, work,
            )  # fmt: skip
            highest = min(path + penalty[s], ceiling) - node[f, COST]
            kept = likeliest(several, order, found, level[s], highest, stop_ids[s], chosen)
            node, context = _with_room(node, context, count + kept)
            for i in range(kept):
                entry = chosen[0, i]
                node[count, COST] = node[f, COST] + chosen[1, i]
                node[count, TOKEN], node[count, SLOT] = found[0][entry], s
                node[count, DEPTH], node[count, PARENT] = depth, f
                node[count, SOURCE] = origin(found[2][entry], bit)
                context[count, 0] = found[0][entry]
                for n in range(1, N):
                    context[count, n] = context[f, n - 1]
                count += 1
        if count == first:
            break
        _sort(node, context, first, count)
        ceiling = min(ceiling, _threshold(node, L, count, budget, S))
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
def _threshold(node, first, count, budget, slots):
    """Cost of the pool's last node if no more nodes follow; MAX_COST below `budget` nodes."""
    order = cheapest(node, first, count, slots)
    return MAX_COST if order.shape[0] < budget else node[order[budget - 1], COST]


@loop
def cheapest(node, first, count, slots):
    """Indices of each slot's MAX_NODES - 1 cheapest nodes, sorted by cost, slot and index."""
    key = np.empty(count - first, np.int64)
    for i in range(first, count):
        key[i - first] = node[i, COST] << 16 | node[i, SLOT]
    order = places_in_order(key)
    held, kept = np.zeros(slots, np.int64), 0
    for i in order:
        s = node[first + i, SLOT]
        if held[s] < MAX_NODES - 1:
            order[kept] = first + i
            held[s] += 1
            kept += 1
    return order[:kept]


@loop
def _front(node, first, count, most, frontier, slots):
    """Indices of a sorted level's nodes to expand, by slot, the cheapest of each slot first."""
    held = np.zeros(slots, np.int64)
    while count > first and node[count - 1, COST] > most:
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
