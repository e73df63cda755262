"""Budgets: the number of drafted tokens that a step verifies, fixed or chosen by expected gain.

The model of `"auto"`. A step over m rows takes r(m) times as long as a step without drafts, which
runs only the roots of the L live slots. A drafted node to which the graph assigns acceptance
probability p is accepted with probability c p. The step verifies the k likeliest nodes, for the k
that maximises

    ( 1 + c/L * (p_1 + .. + p_k) ) / r(L + k)          over k >= 0, 1 at k = 0

which is the number of committed tokens per slot, divided by the time of the step.

- Measure. r begins as the table that was timed when the engine started; each step corrects it
  (`estimator`). c is the ratio of accepted nodes to expected ones. A step without drafts runs from
  time to time, because r is relative to it.
- Probe, with a cool-down. After n consecutive steps whose drafts do not pay, the next step with
  drafts follows 2^n steps later. Once the cool-down has its maximum length, that step verifies
  nodes even if no gain is expected.
- Stop on loss. Independent of expectations, drafts are limited by a credit, in units of steps
  without drafts; each step adds its gain or subtracts its loss (`SpeculationGate`).

A call begins with the uncorrected table. Measured times affect the budget, but never the tokens.
Steps of fixed shapes choose among pool sizes by the same rule.
"""

from csd.engine.step.budget.auto import AutoBudget, AutoPool, Controller
from csd.engine.step.budget.estimator import StepTimesFile, StepTimeTable
from csd.engine.step.budget.fixed import Budget, FixedPool, most_nodes, nodes_of

__all__ = [
    "AutoBudget",
    "AutoPool",
    "Budget",
    "Controller",
    "FixedPool",
    "StepTimeTable",
    "StepTimesFile",
    "most_nodes",
    "nodes_of",
]
