"""Proposal of a step's pool: draft trees of all live slots, cut to the budget."""

import time

from csd.engine.budget import Budget
from csd.graph.drafter import Drafter
from csd.kernels.ops import Ops
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.verify.multi_draft import MultiDraftVerifier
from csd.verify.teacher_forcing import TeacherForcing


def insert_deferred(drafter: Drafter, slots: Slots) -> float:
    """Insert the steps that the drafter has deferred; returns the seconds that this takes."""
    start = time.perf_counter()
    drafter.flush(slots)
    return time.perf_counter() - start


def draft_pool(
    ops: Ops,
    slots: Slots,
    drafter: Drafter | None,
    verifier: MultiDraftVerifier | TeacherForcing | None,
    live_count: int,
    most_nodes: int,
    budget: Budget,
) -> Pool:
    """Returns a pool with the roots of the live slots and the drafted nodes that are worth a row.

    drafter: None in a call without drafts. verifier: proposes the nodes itself, if there is one.
    most_nodes: drafted nodes that `budget` asked for; it chooses how many of them to keep.
    """
    if verifier is not None:
        return verifier.propose(slots, live_count, most_nodes, budget)
    if drafter is None:
        return ops.roots(slots, live_count)
    if not most_nodes:
        drafter.skip(slots)
        return ops.roots(slots, live_count)
    pool = drafter.propose(slots, live_count + most_nodes)
    cost, costs, penalties = ops.node_costs(pool, slots)
    kept = budget.choose(live_count, costs, penalties)
    budget.keep(kept)
    return ops.prune(pool, live_count + kept, cost)
