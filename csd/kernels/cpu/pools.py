"""A pool of roots, prices of nodes and a cut pool, a call each; references: `csd.state.pool`."""

from dataclasses import fields

import numpy as np
import torch

from csd.kernels.cpu.numbers import loop, on_host
from csd.kernels.cpu.order import places_in_order
from csd.kernels.draft_tree.launch import empty_pool
from csd.state.pool import MOST_AHEAD, ROOT, Pool
from csd.state.pool import prices as prices_ref
from csd.state.pool import roots as roots_ref
from csd.state.pool import trim as trim_ref
from csd.state.slots import Slots

FIELDS = tuple(f.name for f in fields(Pool))


@loop
def _roots(
    live,  # [S]
    group,  # [S]
    generated,  # [S]
    prompt_len,  # [G]
    contexts,  # [S, N]
    pool,  # the fields of a Pool, written
):
    token, parent, slot, depth, position, ancestors, cost, source, context = pool[:9]
    slot_start, slot_nodes, group_start = pool[9:]
    S, G, M, N = live.shape[0], prompt_len.shape[0], token.shape[0], context.shape[1]
    slot_start[:], slot_nodes[:] = 0, 0
    m = 0
    for g in range(G):
        group_start[g] = m
        for s in range(S):
            if live[s] and group[s] == g:
                token[m], slot[m], ancestors[m] = contexts[s, 0], s, 1
                position[m] = prompt_len[g] + generated[s]
                for n in range(N):
                    context[m, n] = contexts[s, n]
                slot_start[s], slot_nodes[s] = m, 1
                m += 1
    group_start[G] = m
    for r in range(M):
        parent[r], depth[r], cost[r], source[r] = -1, 0, 0, ROOT
    for r in range(m, M):
        token[r], slot[r], ancestors[r], position[r] = -1, -1, 0, 0
        for n in range(N):
            context[r, n] = -1


def roots(slots: Slots, rows: int) -> Pool:
    """`csd.state.pool.roots`, in `rows` >= live rows."""
    given = slots.live, slots.group, slots.generated, slots.prompt_len, slots.context
    if not on_host(*given):
        return roots_ref(slots, rows)
    groups, context = slots.group_key.shape[0], slots.context.shape[1]
    pool = empty_pool(rows, slots.count, groups, context, slots.live.device)
    _roots(*(x.numpy() for x in given), _arrays(pool))
    return pool


@loop
def _prices(slot, depth, cost, live, generated, pace, priced, starts, told):
    """Writes priced [M], starts [S] and told [M]; returns how many nodes are drafted."""
    fewest, drafted = np.int64(1) << 40, 0
    for s in range(live.shape[0]):
        if live[s]:
            fewest = min(fewest, np.int64(generated[s]))
    for s in range(live.shape[0]):
        ahead = pace[s] * (np.int64(generated[s]) - fewest)
        starts[s] = min(max(ahead, 0), MOST_AHEAD) if live[s] else -1
    for m in range(slot.shape[0]):
        priced[m] = cost[m]
        if depth[m] > 0:
            priced[m] += starts[slot[m]]
            told[drafted] = priced[m]
            drafted += 1
    return drafted


def prices(pool: Pool, slots: Slots) -> tuple[torch.Tensor, list[int], list[int] | None]:
    """`csd.state.pool.prices`."""
    given = pool.slot, pool.depth, pool.cost, slots.live, slots.generated, slots.pace
    if not on_host(*given):
        return prices_ref(pool, slots)
    priced, told = torch.empty_like(pool.cost), np.empty(pool.rows, np.int32)
    starts = np.empty(slots.count, np.int32)
    drafted = _prices(*(x.numpy() for x in given), priced.numpy(), starts, told)
    paced = slots.count > 0 and bool(slots.pace[0])
    return priced, told[:drafted].tolist(), starts.tolist() if paced else None


@loop
def _trim(rows, cost, given, out):
    """Fields of a Pool; those of `out` are written, in `rows` rows."""
    token, parent, slot, depth, position, ancestors, own, source, context = given[:9]
    M, key = slot.shape[0], np.empty(slot.shape[0], np.int64)
    for m in range(M):
        key[m] = cost[m] if slot[m] >= 0 else np.int64(1) << 40
    # of each row, how many before it are kept
    before = np.zeros(M + 1, np.int64)
    for m in places_in_order(key)[:rows]:
        before[m + 1] = 1
    for m in range(M):
        before[m + 1] += before[m]
    slot_start, _, group_start = given[9:]
    to_token, to_parent, to_slot, to_depth, to_position, to_ancestors = out[:6]
    to_own, to_source, to_context, to_start, to_nodes, to_group_start = out[6:]
    for s in range(slot_start.shape[0]):
        to_start[s], to_nodes[s] = before[slot_start[s]], 0
    for g in range(group_start.shape[0]):
        to_group_start[g] = before[group_start[g]]
    for m in range(M):
        r = before[m]
        if before[m + 1] == r:
            continue
        to_token[r], to_slot[r], to_depth[r] = token[m], slot[m], depth[m]
        to_position[r], to_ancestors[r] = position[m], ancestors[m]
        to_own[r], to_source[r] = own[m], source[m]
        to_parent[r] = before[parent[m]] if parent[m] >= 0 else -1
        for n in range(context.shape[1]):
            to_context[r, n] = context[m, n]
        if slot[m] >= 0:
            to_nodes[slot[m]] += 1


def trim(pool: Pool, rows: int, cost: torch.Tensor) -> Pool:
    """`csd.state.pool.trim`."""
    if rows >= pool.rows:
        return pool
    if not on_host(cost, pool.token):
        return trim_ref(pool, rows, cost)
    S, G = pool.slot_start.shape[0], pool.group_start.shape[0] - 1
    out = empty_pool(rows, S, G, pool.context.shape[1], pool.token.device)
    _trim(rows, cost.numpy(), _arrays(pool), _arrays(out))
    return out


def _arrays(pool: Pool) -> tuple[np.ndarray, ...]:
    return tuple([getattr(pool, name).numpy() for name in FIELDS])
