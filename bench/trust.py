"""What a table of trust would bring: how much of what is estimated comes true, by where it is from.

    python -m bench.trust TRACES [--samples 8] [--nodes 8 16] [--problems 12] [--json F]

A cell is the longest context that has a drafted child, and who said it. Of the children of
accepted nodes it counts c that came true and e, the sum of their estimates q. Then q becomes

    min(q f, 0.999)    with f = f0 (c + PRIOR) / (f0 e + PRIOR)

once a step, before the next one drafts. Replays of the consensus graph:

- as it is: f = 1
- learned: f0 = 1; a prompt's samples begin with c = e = 0 and count together
- other files: f = f0, fitted to all files but the one that is replayed
- learned from these: the same f0, and counts of the prompt's samples
- the same file: f fitted to the very problems that are replayed, which no drafter can have

`reference` drafts only: a prototype that kernels do not have.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common import write
from bench.replay import tau
from csd.evaluate.replay import replay
from csd.graph.consensus import ConsensusGraph
from csd.kernels.draft_tree.children import Children, Estimates
from csd.kernels.draft_tree.constants import MAX_COST
from csd.kernels.draft_tree.reference import draft_trees
from csd.kernels.ops import reference
from csd.state.context_table import GraphConfig
from csd.state.pool import COST_ONE, HISTORY, Pool
from csd.state.slots import Slots
from csd.state.verdict import Verdict
from csd.traces.traces import Trace, read_traces

# children that a cell's own count must see to outweigh what it began with
PRIOR = 8.0
# of the least likely children, whatever they are worth
MOST = np.array(MAX_COST)
CELLS = (len(GraphConfig().orders) + 1) * HISTORY


class Counted(Estimates):
    """Estimates times a factor by cell, and the cells of what was estimated."""

    factor: np.ndarray  # [CELLS]

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        # of each level: slot [F], context [F, N] and key, cell, q of its children
        self.levels: list[tuple[np.ndarray, ...]] = []

    def _contexts(self, slot: np.ndarray, context: np.ndarray) -> tuple:
        self.found = super()._contexts(slot, context)
        return self.found

    def children(
        self, slot: np.ndarray, context: np.ndarray, depth: int, highest: np.ndarray
    ) -> Children | None:
        got = super().children(slot, context, depth, np.broadcast_to(MOST, highest.shape))
        if got is None:
            return None
        level = self.level_cost[slot[got.parent]]
        q = 2.0 ** ((level - got.edge) / COST_ONE)
        cell = self._longest(got) * HISTORY + got.source - 1
        # a slot's place among the parents is in the key, so that a path can be told apart
        self.levels.append((slot, context, got.parent, got.token, cell, q))
        factor = self.factor[cell]
        cost = -np.log2(np.minimum(q * factor, 0.999)) * COST_ONE
        edge = np.where(factor == 1, got.edge, (cost + 0.5).astype(np.int64) + level)
        kept = edge <= highest[got.parent]
        return Children(got.parent[kept], got.token[kept], edge[kept], got.source[kept])

    def _longest(self, got: Children) -> np.ndarray:
        """Place of the longest context that has each child, from the longest of all."""
        pair, entry = self.found[:2]
        node, order = np.divmod(pair, len(self.betas))
        token = self.table.succ_token.take(entry, 0)
        key = (node[:, None] << 31 | token)[token >= 0]
        by = key.argsort(kind="stable")
        at = key[by].searchsorted(got.parent << 31 | got.token)
        return np.broadcast_to(order[:, None], token.shape)[token >= 0][by[at]]


class Learned(ConsensusGraph):
    """The graph with a table of trust, which learns where `learns`."""

    def __init__(self, first: np.ndarray, learns: bool):
        super().__init__(reference(), torch.device("cpu"))
        self.first, self.learns = first, learns
        self.came, self.expected = np.zeros(CELLS), np.zeros(CELLS)

    def propose(self, slots: Slots, rows: int, noise: Any = None, nodes: Any = None) -> Pool:
        self.state = Counted(self.table, slots, self.config, noise)
        self.state.factor = self.first
        if self.learns:
            least = self.first * self.expected + PRIOR
            self.state.factor = self.first * (self.came + PRIOR) / least
        return draft_trees(self.state, rows, nodes)

    def insert(self, pool: Pool, slots: Slots, verdict: Verdict) -> None:
        drawn, parent = verdict.sample.numpy(), pool.parent.numpy()
        depth, token, slot = pool.depth.numpy(), pool.token.numpy(), pool.slot.numpy()
        # children of nodes that were accepted
        tried = (depth > 0) & (drawn[parent] >= 0)
        for i, (owner, context, above, child, cell, q) in enumerate(self.state.levels):
            row = (tried & (depth == i + 1)).nonzero()[0]
            # [S, N]: of each slot's accepted node of this level
            path = np.full((slots.count, context.shape[1]), -2)
            path[slot[row]] = pool.context.numpy()[parent[row]]
            mine = (context == path[owner]).all(1)[above].nonzero()[0]
            key = owner[above[mine]] << 31 | child[mine]
            by = key.argsort()
            at = mine[by[key[by].searchsorted(slot[row].astype(np.int64) << 31 | token[row])]]
            np.add.at(self.expected, cell[at], q[at])
            np.add.at(self.came, cell[at], token[row] == drawn[parent[row]])
        super().insert(pool, slots, verdict)


def run(traces: list[Trace], samples: int, nodes: int, first: np.ndarray, learns: bool) -> tuple:
    """tau over all problems, and the counts [2, CELLS]: what came true, what was expected."""
    found, counts = [], np.zeros((2, CELLS))
    for trace in traces:
        drafter = Learned(first, learns)
        found.append(replay(trace, drafter, samples, nodes))
        counts += drafter.came, drafter.expected
    return tau(found), counts


def fitted(counts: list[np.ndarray]) -> np.ndarray:
    """[CELLS]: a factor for files of equal weight; near 1 where they have few."""
    came, expected = sum(c / c[0].sum() for c in counts)
    return (came + 0.004) / (expected + 0.004)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--problems", type=int, help="of each file at most, evenly spaced")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    files, rows, start = {}, [], time.time()
    for path in args.traces:
        traces = list(read_traces(path))
        step = max(len(traces) // (args.problems or len(traces)), 1)
        files[Path(path).name.split(".jsonl")[0]] = traces[::step][: args.problems]
    samples = {n: min(args.samples, *(len(t.samples) for t in x)) for n, x in files.items()}
    flat = np.ones(CELLS)
    for nodes in args.nodes:
        plain = {n: run(t, samples[n], nodes, flat, False) for n, t in files.items()}
        for name, traces in files.items():
            others = fitted([plain[n][1] for n in files if n != name or len(files) == 1])
            same = fitted([plain[name][1]])
            taus = {"as it is": plain[name][0]}
            for title, first, learns in (
                ("learned", flat, True),
                ("other files", others, False),
                ("learned from these", others, True),
                ("the same file", same, False),
            ):
                taus[title] = run(traces, samples[name], nodes, first, learns)[0]
            rows.append({
                "trace": name, "problems": len(traces), "samples": samples[name], "nodes": nodes,
                "tau": taus, "ratio": {t: x / taus["as it is"] for t, x in taus.items()},
                "factors of the same file": same.round(3).reshape(-1, HISTORY).tolist(),
            })  # fmt: skip
            ratios = (f"{t} {x:.4f}" for t, x in rows[-1]["ratio"].items())
            print(f"{name:28} {nodes:3} {taus['as it is']:.4f}  " + ", ".join(ratios), flush=True)
    write({"seconds": time.time() - start, "rows": rows}, args.json, indent=1)


if __name__ == "__main__":
    main()
