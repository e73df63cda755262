"""The best that can be had, as linear programs solved by scipy."""

from itertools import combinations

import torch
from helpers.runs.verify_cases import tuples
from scipy.optimize import linprog

from csd.research.verify.recursive import without_replacement
from csd.research.verify.scheme import prepare_distributions


def float64(x):
    return torch.tensor(x, dtype=torch.float64)


def best_split(base, mass, limit):
    """Optimum of the program of `flow.py` for one row."""
    s = len(base)
    pairs = list(combinations(range(s), 2))
    # variables: the share of the smaller index of each pair, then what is of use to each item
    cost = torch.zeros(len(pairs) + s)
    cost[len(pairs) :] = -1
    rows, right = torch.zeros(s, len(pairs) + s, dtype=torch.float64), base.clone()
    rows[torch.arange(s), len(pairs) + torch.arange(s)] = 1
    for n, (i, j) in enumerate(pairs):
        rows[i, n], rows[j, n] = -1, 1
        right[j] += mass[i, j]
    bounds = [(0, float(mass[i, j])) for i, j in pairs] + [(0, float(x)) for x in limit]
    found = linprog(cost, A_ub=rows, b_ub=right, bounds=bounds)
    assert found.success
    return -found.fun


def transport(q, drafts, chance):
    """Optimum of the full program over couplings of drafts [n, k], of probs [n], and output."""
    vocab, n = len(q), len(drafts)
    gain = torch.zeros(n, vocab)
    for i, x in enumerate(drafts):
        gain[i, x[x >= 0]] = 1
    equal = torch.zeros(n + vocab, n * vocab, dtype=torch.float64)
    for i in range(n):
        equal[i, i * vocab : (i + 1) * vocab] = 1
    for y in range(vocab):
        equal[n + y, y::vocab] = 1
    # without presolve, which takes masses of 1e-8 for infeasible
    found = linprog(
        -gain.flatten(),
        A_eq=equal[:-1],
        b_eq=torch.cat([chance, q])[:-1],
        options={"presolve": False},
    )
    assert found.success
    return -found.fun


def independent(p, k):
    """All drafts [n, k] of k draws of p [vocab], and their distribution [n]."""
    drafts = torch.stack(tuples(len(p), k))
    mass = torch.cat([p, (1 - p.sum()).clamp(min=0)[None]])
    return drafts, mass[drafts].prod(-1)


def distinct(p, k):
    """The same without replacement: null only when nothing is left."""
    drafts = torch.stack(tuples(len(p), k))
    _, probs = prepare_distributions(p.new_ones(1, len(p)) / len(p), p[None], k)
    x = torch.where(drafts < 0, len(p), drafts)
    probs = without_replacement(x, probs[:, 0].expand(len(x), -1))
    return drafts, probs.gather(2, x[:, :, None])[:, :, 0].prod(-1)


def selection_optimum(q, p1, p2, tokens=None, alphabet=None):
    """Optimum of sum of min(q, p_I) over the selection weights, from the rule as it is written.

    Tokens that can be drafted are ranked by q - p1 p2, null behind them. Weights of pairs within
    the first `tokens` of the first `alphabet` are free; else the smaller rank wins, and of two
    drafts beyond the alphabet the first, unless it is null.
    """
    q, p1, p2 = (
        torch.cat([x, y]).tolist()
        for x, y in ((q, torch.zeros(1)), (p1, 1 - p1.sum(0, True)), (p2, 1 - p2.sum(0, True)))
    )
    null = len(q) - 1
    drafted = [i for i in range(null) if p1[i] + p2[i] > 0]
    order = [*sorted(drafted, key=lambda i: p1[i] * p2[i] - q[i]), null]
    order = order[: alphabet or len(q)]
    free = set(order[: tokens or len(q)])
    rank = {x: order.index(x) if x in order else len(q) for x in range(len(q))}
    weights = {}
    base, rows = [0.0] * len(q), [{} for _ in q]
    for i in range(len(q)):
        for j in range(len(q)):
            mass = p1[i] * p2[j]
            if i == j:
                base[i] += mass
            elif i in free and j in free:
                # the first wins with a weight of its own
                n = weights.setdefault((i, j), len(weights))
                rows[i][n] = rows[i].get(n, 0) + mass
                rows[j][n] = rows[j].get(n, 0) - mass
                base[j] += mass
            elif rank[i] < rank[j] or (rank[i] == rank[j] and i != null):
                base[i] += mass
            else:
                base[j] += mass
    n, V = len(weights), len(q)
    cost, A = [0.0] * n + [-1.0] * V, torch.zeros(V, n + V, dtype=torch.float64)
    for y in range(V):
        A[y, n + y] = 1
        for w, mass in rows[y].items():
            A[y, w] -= mass
    found = linprog(cost, A_ub=A, b_ub=base, bounds=[(0, 1)] * n + [(0, x) for x in q])
    assert found.success
    return -found.fun
