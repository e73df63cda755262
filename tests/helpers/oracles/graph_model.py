"""The consensus graph in plain Python: slow, obvious, one element at a time."""

import torch

from csd.kernels.table import lookup as graph_lookup
from csd.state.context_table import MAX_TOTAL, Table


def wrap(x: int) -> int:
    """x as a signed 64-bit integer."""
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x


def context_hash(group: int, tokens: tuple[int, ...]) -> int:
    z = group * int(graph_lookup.GROUP_FACTOR)
    for token, factor in zip(tokens, graph_lookup.TOKEN_FACTORS.tolist(), strict=False):
        z += (token + 2) * factor
    z = wrap(z)
    z = wrap((z ^ (z >> 32)) * int(graph_lookup.FINAL_FACTOR))
    return z ^ (z >> 29)


class Entry:
    def __init__(self, group, code, tokens):
        self.group, self.code, self.tokens = group, code, tokens
        self.total = self.stamp = 0
        self.successors = []  # (token, weight, source), heaviest first


class Graph:
    def __init__(self, config, code=context_hash):
        self.config, self.code = config, code
        self.entries = [None] * config.capacity
        self.step = self.dropped = 0
        self.prior = None  # a graph of answers to other prompts

    def bucket(self, code: int) -> range:
        first = code % (len(self.entries) // self.config.ways) * self.config.ways
        return range(first, first + self.config.ways)

    def find(self, group, tokens, code):
        for i in self.bucket(code):
            e = self.entries[i]
            if e is not None and e.code == code:
                return i if (e.group, e.tokens) == (group, tokens) else None
        return None

    def insert(self, rows, live_groups):
        """rows: (group, context, [(token, weight)], total, bit)."""
        self.step += 1
        updates, order = {}, []  # leader key -> its rows
        for group, context, successors, total, bit in rows:
            for n in self.config.orders:
                tokens = tuple(context[:n])
                if group < 0 or len(tokens) < n or -1 in tokens:
                    continue
                code = self.code(group, tokens)
                if code not in updates:
                    updates[code] = (group, tokens, [])
                    order.append(code)
                if updates[code][:2] == (group, tokens):
                    updates[code][2].append((successors, total, bit))
        place = {code: self.find(*updates[code][:2], code) for code in order}
        for i in place.values():
            if i is not None:
                self.entries[i].stamp = self.step
        for code in order:
            if place[code] is None:
                i = place[code] = self.room(code, live_groups)
                if i is None:
                    self.dropped += 1
                else:
                    self.entries[i] = Entry(*updates[code][:1], code, updates[code][1])
                    self.entries[i].stamp = self.step
        for code in order:
            if place[code] is not None:
                self.merge(self.entries[place[code]], updates[code][2])

    def room(self, code, live_groups):
        best = None
        for i in self.bucket(code):
            e = self.entries[i]
            if e is None or e.group not in live_groups:
                # a dead entry taken by this call belongs to a live group by now
                rank = (0, i)
            elif e.stamp != self.step:
                rank = (1, e.total, e.stamp, i)
            else:
                continue
            best = rank if best is None else min(best, rank)
        return None if best is None else best[-1]

    def merge(self, entry, updates):
        weights = {t: w for t, w, _ in entry.successors}
        sources = {t: s for t, _, s in entry.successors}
        for successors, total, bit in updates:
            entry.total += total
            for token, weight in successors:
                if token >= 0 and weight > 0:
                    weights[token] = weights.get(token, 0) + weight
                    sources[token] = sources.get(token, 0) | 1 << bit
        kept = sorted(weights, key=lambda t: (-weights[t], t))[: self.config.successors]
        half = entry.total > MAX_TOTAL
        entry.total >>= half
        entry.successors = [(t, weights[t] >> half, sources[t]) for t in kept if weights[t] >> half]

    def table(self) -> Table:
        """The same graph as tensors."""
        table = Table.empty(self.config)
        table.step[0], table.dropped[0] = self.step, self.dropped
        for i, e in enumerate(self.entries):
            if e is None:
                continue
            table.entry_group[i], table.entry_hash[i] = e.group, e.code
            table.entry_tokens[i, : len(e.tokens)] = torch.tensor(e.tokens)
            table.entry_total[i], table.entry_stamp[i] = e.total, e.stamp
            for j, (token, weight, source) in enumerate(e.successors):
                table.succ_token[i, j], table.succ_weight[i, j] = token, weight
                table.succ_source[i, j] = wrap(source)
        if self.prior is not None:
            table.prior = self.prior.table()
            table.prior.succ_source.zero_()
        return table
