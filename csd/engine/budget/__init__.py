"""Budgets: the number of drafted tokens that a step verifies, fixed or as many as pay.

The model of `"auto"`. A step over m rows takes r(m) times a step without drafts, over the L live
slots' roots alone. A drafted node that the graph expects to be accepted with probability p is
accepted with probability c p. The step verifies the k likeliest nodes that maximise

    ( 1 + c/L * (p_1 + .. + p_k) ) / r(L + k)          over k >= 0, 1 at k = 0

which are committed tokens a slot by the time they take.

- Measure. r begins as the table that was timed when the engine started; each step corrects it
  (`estimator`). c is the ratio of accepted nodes to expected ones. A step without drafts runs now
  and then, because r is relative to it.
- Probe, with a cool-down. After n steps in a row whose drafts do not pay the next one comes after
  2^n steps, and verifies nodes whatever is expected of them once the cool-down is longest.
- Stop on loss. Whatever is expected, a step drafts out of a credit, in steps without drafts, that
  it changes by what it won or lost (`gate`).

A call begins with the table alone. Decisions depend on time, tokens never do. Steps of fixed shapes
choose among pool sizes by the same rule.
"""

from csd.engine.budget.auto import AutoBudget, AutoPool
from csd.engine.budget.fixed import Budget, FixedBudget, FixedPool, most_nodes, nodes_of
from csd.engine.budget.table import StepTimesFile, StepTimeTable

__all__ = [
    "AutoBudget", "AutoPool", "Budget", "FixedBudget", "FixedPool", "StepTimeTable",
    "StepTimesFile", "most_nodes", "nodes_of",
]  # fmt: skip
