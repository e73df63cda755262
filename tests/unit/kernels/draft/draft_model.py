"""Draft trees in plain Python: slow, obvious, one node at a time."""

import math
from fractions import Fraction
from functools import cache

import torch
from helpers.oracles.graph_model import wrap

from csd.kernels.common.noise import philox_words_ref
from csd.state.context_table import ANY, PRIOR_KEY
from csd.state.pool import (
    HISTORY,
    MAX_CHILDREN,
    MAX_DEPTH,
    MAX_NODES,
    OWN,
    PRIOR,
    PROMPT,
    ROOT,
    SIBLING,
    Pool,
)


def children(graph, slots, s, context, position, noise):
    """[(token, cost, source)] of a node of slot s."""
    config = graph.config
    group = int(slots.group_key[slots.group[s]])
    greedy = float(slots.temperature[s]) <= 0
    own = 1 << int(slots.sample[s]) % 62
    rem, q, source = 1.0, {}, {}
    lookups = [(graph, group, n) for n in reversed(config.orders)]
    if graph.prior is not None:
        lookups += [(graph.prior, PRIOR_KEY, n) for n in reversed(config.prior_orders)]
    for held, owner, n in (*lookups, (graph, group, 0)):
        tokens = tuple(context[:n]) if n else (ANY,)
        if -1 in tokens:
            continue
        i = held.find(owner, tokens, held.code(owner, tokens))
        if i is None:
            continue
        entry = held.entries[i]
        if held is graph:
            trust = entry.total * config.trust / (entry.total + config.smoothing)
        else:
            trust = entry.total * config.prior_trust / (entry.total + config.prior_smoothing)
        share, rem = rem * trust, rem * (1 - trust)
        seen = sum(w for _, w, _ in entry.successors)
        if greedy:
            mass = {t: share / entry.total * w for t, w, _ in entry.successors}
        else:
            beta = config.beta + n * config.beta_order
            mine = {
                t: w * (config.own_weight if sources & own and held is graph else 1)
                for t, w, sources in entry.successors
            }
            scale = seen / max(sum(mine.values()), 1) / entry.total
            race = {
                t: math.exp(beta * (math.log(w * scale) + noise(s, position, t)))
                for t, w in mine.items()
            }
            rest = math.log(max(1 - seen / entry.total, 1e-3)) + 0.5772156649015329
            norm = sum(race.values()) + math.exp(beta * rest)
            u = config.uncoupled
            mass = {t: share * ((1 - u) / norm * x + u * mine[t] * scale) for t, x in race.items()}
        for token, _, sources in entry.successors:
            q[token] = q.get(token, 0) + int(mass[token] * 2**24)
            source.setdefault(token, sources if held is graph else 0)
    q = {t: min(x, 2**24) for t, x in q.items()}
    kept = sorted((t for t in q if q[t] > 0), key=lambda t: (-q[t], t))[:MAX_CHILDREN]
    level = level_cost(config, int(slots.generated[s]), int(slots.step[s]))
    result = []
    for t in kept:
        cost = round(-math.log2(q[t] / 2**24) * 2**16) + level
        sources = source[t]
        earlier = PROMPT if sources >> 62 & 1 else HISTORY if sources else PRIOR
        kind = OWN if sources & own else SIBLING if sources & ((1 << 62) - 1) else earlier
        if t not in slots.stop_ids[s].tolist():
            result.append((t, cost, kind))
    return result


def level_cost(config, generated, steps):
    """More for a sample that has committed less than 2.5 tokens a step, and less for others."""
    usual = round(-math.log2(config.decay) * 2**16)
    if config.settle == 0:
        return usual
    rate = Fraction(2 * generated + 5 * config.settle, 2 * (steps + config.settle))
    return min(max(math.floor(usual * Fraction(5, 2) / rate), usual // 4), 3 * usual // 2)


def keyed_noise(slots):
    @cache
    def noise(s, position, token):
        word = philox_words_ref(
            slots.key[s], torch.tensor(token), torch.tensor(position), slots.sample[s], 0
        )
        return -math.log(-math.log((2**32 - 1 - int(word) + 0.5) / 2**32))

    return noise


def grown(graph, slots, noise=None):
    """Every live slot's nodes with their costs, for pools of any number of rows."""
    config = graph.config
    noise = noise or keyed_noise(slots)
    limit = (1 << 22) - 1 - 4 * 65536
    if config.min_prob:
        limit = min(limit, round(-math.log2(config.min_prob) * 2**16))
    trees = {}
    for s in range(slots.count):
        if not slots.live[s]:
            continue
        generated, nodes = int(slots.generated[s]), []
        front = [(0, None, None, slots.context[s].tolist())]
        for depth in range(1, min(config.max_depth, MAX_DEPTH) + 1):
            if generated + depth >= int(slots.max_new[s]):
                break
            level = []
            for rank, (cost, _, node, context) in enumerate(front):
                for t, c, kind in children(graph, slots, s, context, generated + depth - 1, noise):
                    if cost + c <= limit:
                        level.append((cost + c, t, rank, node, kind, [t, *context[:-1]]))
            level.sort(key=lambda x: x[:3])
            front = []
            for cost, t, rank, parent, kind, context in level:
                node = dict(
                    cost=cost,
                    depth=depth,
                    token=t,
                    rank=rank,
                    parent=parent,
                    kind=kind,
                    context=context,
                    slot=s,
                )
                nodes.append(node)
                front.append((cost, t, node, context))
            front = front[: config.frontier]
        nodes.sort(key=lambda x: (x["cost"], x["depth"], x["token"], x["rank"]))
        trees[s] = nodes[: MAX_NODES - 1]
    everything = [x for nodes in trees.values() for x in nodes]
    # progress penalty: for each token by which a slot is ahead of the last one
    last = min((int(slots.generated[s]) for s in trees), default=0)
    penalty = {
        s: min(int(slots.progress_penalty[s]) * (int(slots.generated[s]) - last), 4 * 65536)
        for s in trees
    }
    # where noise does not decide, also for those by which it leads those that began with it
    alone = len({int(slots.group[s]) for s in trees}) == 1
    for s in trees:
        if alone and slots.temperature[s] == 0:
            mates = [t for t in trees if slots.step[t] == slots.step[s]]
            ahead = int(slots.generated[s] - min(slots.generated[t] for t in mates))
            penalty[s] = max(penalty[s], min(config.group_penalty * ahead, 2 * 65536))
    for x in everything:
        x["total"] = x["cost"] + penalty[x["slot"]]
    return trees


def draft(graph, slots, rows, noise=None, trees=None) -> Pool:
    """trees: those of `grown`, if they are there already."""
    trees = grown(graph, slots, noise) if trees is None else trees
    everything = [x for nodes in trees.values() for x in nodes]
    everything.sort(key=lambda x: (x["total"], x["slot"], x["depth"], x["token"], x["rank"]))
    chosen = {id(x) for x in everything[: rows - len(trees)]}

    pool = Pool.empty(rows, slots.count, slots.group_key.shape[0], slots.context.shape[1])
    row = 0
    for g in range(slots.group_key.shape[0]):
        pool.group_start[g] = row
        for s, nodes in trees.items():
            if int(slots.group[s]) != g:
                continue
            start, at = row, {}
            base = int(slots.prompt_len[g] + slots.generated[s])
            root = dict(
                cost=0,
                depth=0,
                token=int(slots.context[s, 0]),
                parent=None,
                kind=ROOT,
                context=slots.context[s].tolist(),
            )
            for x in [root, *(x for x in nodes if id(x) in chosen)]:
                at[id(x)] = row
                pool.token[row], pool.slot[row], pool.depth[row] = x["token"], s, x["depth"]
                pool.position[row], pool.cost[row] = base + x["depth"], x["cost"]
                pool.source[row], pool.context[row] = x["kind"], torch.tensor(x["context"])
                word = 1 << row - start
                if x["depth"]:
                    parent = at[id(x["parent"])] if x["parent"] else start
                    pool.parent[row] = parent
                    word |= int(pool.ancestors[parent])
                pool.ancestors[row] = wrap(word)
                row += 1
            pool.slot_start[s], pool.slot_nodes[s] = start, row - start
    pool.group_start[-1] = row
    return pool
