"""Random graphs and slots to draft from."""

import random

import torch
from helpers.oracles.graph_model import Graph, wrap

from csd.state.context_table import ANY, PRIOR_KEY, GraphConfig, Table
from csd.state.pool import PROGRESS_PENALTY, Pool
from csd.state.record import declared
from csd.state.slots import Slots

CONFIG = GraphConfig(orders=(1, 2, 3), capacity=1024, ways=16, successors=8)
PRIOR = GraphConfig(orders=(1, 2, 3), capacity=256, ways=4, successors=5)


def random_graph(rng, config=CONFIG, vocab=6, tokens=60, groups=(11, 12), weights=None):
    """A graph of some random walks of each group."""
    graph = Graph(config)
    N = config.context
    for group in groups:
        walk = [rng.randrange(vocab) for _ in range(tokens)]
        rows = []
        for i in range(1, tokens):
            context = ([-1] * N + walk[:i])[: -N - 1 : -1]
            pairs = [(t, rng.choice(weights or [1, 999, 5000, 20000])) for t in range(vocab)]
            pairs = rng.sample(pairs, rng.randrange(1, min(vocab, 8)))
            if walk[i] not in [t for t, _ in pairs]:
                pairs.append((walk[i], 9000))
            total = sum(w for _, w in pairs) + rng.choice([0, 3000])
            rows.append((group, context, pairs, total, rng.choice([0, 1, 2, 5, 61, 62, 63])))
            if rng.random() < 0.2:
                rows.append((group, [ANY, *[-1] * (N - 1)], pairs, total, rng.randrange(64)))
        for i in range(0, len(rows), 16):
            graph.insert(rows[i : i + 16], groups)
    return graph


def random_prior(rng, config=PRIOR, vocab=6, tokens=60):
    """A graph of random walks that belong to no group."""
    return random_graph(rng, config, vocab, tokens, (PRIOR_KEY,))


def parts_of_prior(rng, parts=3, config=PRIOR, vocab=6, tokens=60):
    """A prior's table of several parts, and the tables that it consists of."""
    alone = [random_prior(rng, config, vocab, tokens).table() for _ in range(parts)]
    whole = Table.empty(config, parts=parts)
    for i, table in enumerate(alone):
        # a prior's successors have no source
        table.succ_source.zero_()
        whole.part(i).copy_(table)
    return whole, alone


def random_slots(rng, count, config=CONFIG, vocab=6, groups=(11, 12), live=None):
    """Slots of several groups in any order, some dead, some greedy, some near their end."""
    slots = Slots.empty(count, vocab, 100, config.context)
    # there are as many groups as slots
    groups = groups[:count]
    for s in range(count):
        slots.live[s] = rng.random() < 0.7 if live is None else live
        slots.group[s] = rng.randrange(len(groups))
        slots.key[s] = wrap(rng.getrandbits(64))
        slots.sample[s] = rng.choice([0, 1, 5, 61, 62, 64])
        slots.generated[s] = rng.randrange(40)
        step = rng.randrange(int(slots.generated[s]) + 1)
        # many began together
        slots.step[s] = 1 if step % 2 else step
        slots.max_new[s] = slots.generated[s] + rng.choice([1, 2, 3, 30])
        slots.temperature[s] = rng.choice([0, 0.7, 1.0])
        short = rng.choice([0, 0, 0, 1])
        tail = [rng.randrange(vocab) for _ in range(config.context - short)]
        slots.context[s, : len(tail)] = torch.tensor(tail)
        if rng.random() < 0.3:
            slots.stop_ids[s, 0] = rng.randrange(vocab)
    slots.progress_penalty[:] = rng.choice([0, PROGRESS_PENALTY, 30000])
    slots.group_key[: len(groups)] = torch.tensor(groups)
    slots.prompt_len[: len(groups)] = torch.arange(len(groups)) * 7 + 3
    return slots


def one_slot(config=CONFIG, temperature=0.0, max_new=100, group=11):
    slots = random_slots(random.Random(0), 1, config, live=True)
    slots.group[0], slots.group_key[0] = 0, group
    slots.context[0] = torch.arange(config.context)
    slots.temperature[0], slots.generated[0], slots.max_new[0] = temperature, 0, max_new
    slots.step[0] = 0
    slots.stop_ids.fill_(-1)
    slots.sample[0] = 0
    return slots


def start_greedily(slots, max_new=30) -> None:
    """At their first token, at temperature 0 and without end tokens."""
    slots.temperature[:], slots.generated[:], slots.max_new[:] = 0, 0, max_new
    slots.step[:] = 0
    slots.stop_ids.fill_(-1)


def equal_slots(rng, count, **options):
    """Greedy slots of one context: whole trees tie."""
    slots = random_slots(rng, count, live=True, **options)
    slots.context[:] = slots.context[:1].clone()
    start_greedily(slots)
    return slots


def used_pool(rows, slots, context=CONFIG.context):
    """A pool that holds what another step left there, of contexts of `context` tokens."""
    pool = Pool.empty(rows, slots, slots, context)
    for name in declared(Pool):
        getattr(pool, name).fill_(-77)
    return pool


def odd_case(rng, counts=(1, 2, 5, 13)):
    """A random config, and a graph and slots of it: (config, graph, slots)."""
    config = GraphConfig(
        orders=rng.choice([(1,), (2, 3), (1, 2, 3, 5, 8), (1, 2, 3, 4, 5, 6, 7), (1, 4, 16)]),
        capacity=1 << rng.choice([4, 8, 11]),
        ways=rng.choice([1, 2, 16]),
        successors=rng.choice([1, 3, 7, 9, 16]),
        frontier=rng.choice([1, 2, 5, 8]),
        decay=rng.choice([1.0, 0.8, 0.3]),
        settle=rng.choice([0, 1, 8]),
        uncoupled=rng.choice([0.0, 0.2, 1.0]),
        own_weight=rng.choice([0.3, 1.0, 4.0]),
        group_penalty=rng.choice([0, 3000, 8192, 131072]),
        beta=rng.choice([0.4, 1.0]),
        max_depth=rng.choice([1, 3, 16, 40]),
        min_prob=rng.choice([0, 0, 0.003]),
    )
    count, vocab = rng.choice(counts), rng.choice([2, 5, 11, 40])
    groups = tuple(range(11, 11 + rng.choice([1, 2, 5])))
    graph = random_graph(rng, config, vocab, rng.choice([1, 2, 25, 90]), groups)
    return config, graph, random_slots(rng, count, config, vocab, groups)
