"""How many levels a draft's trees are grown: what the slots' chains of look-ups come to on a GPU.

    python -m bench.growth TRACES [--samples 16] [--nodes 8] [--problems 2] [--json F]

Replays of the consensus graph, every fourth step. A step waits for its slowest slot, so its levels
are the most of a slot; "mean" is of all slots. What stops a slot:

    alone      its own list of the likeliest nodes is full and holds no child of the last level
    bound      the same, and where a level alone makes all children dearer than the list's last
    cut        the same, and all slots' lists are cut at the pool's size once, after FIRST_LEVELS
    cut again  the same after each level, the least that can be

The pool is the same with each of them. "cut" is what `csd.kernels.draft_tree` does.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from bench.common import finish, table
from csd.evaluate.replay import replay
from csd.graph.consensus import ConsensusGraph
from csd.kernels.draft_tree import DraftNoise
from csd.kernels.draft_tree.children import Estimates
from csd.kernels.draft_tree.constants import FIRST_LEVELS, MAX_COST, max_path_cost
from csd.kernels.draft_tree.reference import rank_in, starts_ahead
from csd.kernels.ops import reference
from csd.kernels.runs import stable_order
from csd.state.pool import MAX_DEPTH, MAX_NODES, Pool
from csd.state.slots import Slots
from csd.traces.traces import read_traces

EVERY = 4
RULES = {
    "alone": (False, ()),
    "bound": (True, ()),
    "cut": (True, (FIRST_LEVELS,)),
    "cut again": (True, range(1, MAX_DEPTH)),
}


def levels(state: Estimates, budget: int, bound: bool, cuts: tuple | range) -> np.ndarray:
    """[S], how many levels each slot is grown for a pool of `budget` drafted nodes.

    bound: whether a level's cost stops nodes; cuts: after which levels all slots' lists are cut.
    """
    slot = state.live.nonzero()[0]
    width = min(MAX_NODES - 1, budget)
    ahead = starts_ahead(state, slot)
    limit = np.minimum(state.max_new - 1 - state.generated, min(state.config.max_depth, MAX_DEPTH))
    highest = max_path_cost(state.config) + ahead
    cost, context = ahead[slot], state.context[slot]
    grown = np.zeros(state.live.size, int)
    # all slots' lists: costs and slots in the order of depth
    listed, owner = np.empty(0, np.int64), np.empty(0, np.int64)
    depth = 0
    while True:
        if depth in cuts and listed.size > budget:
            highest = np.minimum(highest, np.partition(listed, budget)[budget])
        going = limit[slot] > depth
        if bound:
            going &= cost + state.level_cost[slot] <= highest[slot]
        slot, cost, context = slot[going], cost[going], context[going]
        if not slot.size:
            return grown
        depth += 1
        grown[slot] = depth
        found = state.children(slot, context, depth, highest[slot] - cost)
        if found is None or not found.parent.size:
            return grown
        total = cost[found.parent] + found.edge
        order = stable_order(total << 31 | found.token, (MAX_COST + 1) << 31)
        cost, at = total[order], found.parent[order]
        slot, context = slot[at], np.column_stack([found.token[order], context[at, :-1]])
        before = listed.size
        listed, owner = np.concatenate([listed, cost]), np.concatenate([owner, slot])
        by = listed.argsort(kind="stable")
        kept = np.zeros(listed.size, bool)
        kept[by[rank_in(owner[by]) < width]] = True
        new, listed, owner = kept[before:], listed[kept], owner[kept]
        if bound:
            full = np.bincount(owner, minlength=grown.size) == width
            last = np.zeros_like(highest)
            np.maximum.at(last, owner, listed)
            new &= cost + state.level_cost[slot] <= np.where(full, last, MAX_COST)[slot]
        front = new.nonzero()[0]
        front = front[rank_in(slot[front]) < state.config.frontier]
        slot, cost, context = slot[front], cost[front], context[front]


class Steps(ConsensusGraph):
    """The graph, and of some steps the slowest slot's and the mean levels by each of RULES, and
    the deepest picked node."""

    def __init__(self) -> None:
        super().__init__(reference(), torch.device("cpu"))
        self.steps: list[list[float]] = []
        self._step = 0

    def propose(
        self, slots: Slots, rows: int, noise: DraftNoise | None = None, *, nodes: int | None = None
    ) -> Pool:
        pool = super().propose(slots, rows, noise, nodes=nodes)
        self._step += 1
        if self._step % EVERY:
            return pool
        state = Estimates(self.table, slots, self.config, noise)
        live = state.live
        budget = rows - live.sum() if nodes is None else min(nodes, rows - live.sum())
        # a successor of weight 0 has a score of 0
        with np.errstate(divide="ignore"):
            found = [levels(state, int(budget), *rule)[live] for rule in RULES.values()]
        self.steps.append([f(x) for x in found for f in (np.max, np.mean)] + [pool.depth.max()])
        return pool


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8])
    parser.add_argument("--problems", type=int, help="the first so many of each file")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows, start = [], time.time()
    for path in args.traces:
        traces = list(read_traces(path))[: args.problems]
        samples = min(args.samples, *(len(t.samples) for t in traces))
        for nodes in args.nodes:
            steps = []
            for trace in traces:
                drafter = Steps()
                replay(trace, drafter, samples, nodes)
                steps += drafter.steps
            means = np.mean(steps, 0).tolist()
            names = [name + of for name in RULES for of in ("", ", mean")] + ["deepest picked"]
            rows.append({
                "trace": Path(path).name.split(".jsonl")[0], "problems": len(traces),
                "samples": samples, "nodes": nodes, "steps": len(steps),
                **dict(zip(names, means, strict=True)),
            })  # fmt: skip
            print(table(rows[-1:]), flush=True)
    finish({"bench": "growth", "seconds": time.time() - start, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
