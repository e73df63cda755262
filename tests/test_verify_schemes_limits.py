"""Acceptance against linear programs solved by scipy, and against the bounds."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from verify_cases import EVERY, corners, enumerate_law, laws, tuples

from csd.verify import (
    Canonical,
    Recursive,
    can_always_accept,
    joint_acceptance,
    optimal_acceptance,
)
from csd.verify.flow import split_pairs
from csd.verify.recursive import without_replacement
from csd.verify.scheme import prepare_laws


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


def transport(q, p, k):
    """Optimum of the full program over couplings of k i.i.d. drafts and the output."""
    vocab = len(q)
    drafts = tuples(vocab, k)
    n = len(drafts)
    gain = torch.zeros(n, vocab)
    chance = torch.ones(n, dtype=torch.float64)
    mass = torch.cat([p, (1 - p.sum()).clamp(min=0)[None]])
    for i, x in enumerate(drafts):
        chance[i] = mass[x].prod()
        gain[i, x[x >= 0]] = 1
    equal = torch.zeros(n + vocab, n * vocab, dtype=torch.float64)
    for i in range(n):
        equal[i, i * vocab : (i + 1) * vocab] = 1
    for y in range(vocab):
        equal[n + y, y::vocab] = 1
    found = linprog(-gain.flatten(), A_eq=equal[:-1], b_eq=torch.cat([chance, q])[:-1])
    assert found.success
    return -found.fun


@pytest.mark.parametrize("s", [1, 2, 3, 6])
def test_flow_is_the_programs_optimum(s):
    generator = torch.Generator().manual_seed(s)

    def random(*shape):
        x = torch.rand(*shape, generator=generator, dtype=torch.float64)
        return x * (torch.rand(*shape, generator=generator) > 0.3)

    base, limit, mass = random(40, s) / 4, random(40, s), random(40, s, s).triu(1)
    mass = mass + mass.mT
    flow = split_pairs(base, mass, limit)
    assert (flow >= 0).all() and (flow <= mass).all()
    assert (flow + flow.mT - mass).abs().max() < 1e-14
    found = torch.minimum(limit, base + flow.sum(-1)).sum(-1)
    expected = float64([best_split(*row) for row in zip(base, mass, limit, strict=True)])
    assert (found - expected).abs().max() < 1e-7


def test_flow_that_must_pass_through_others():
    """Mass moves from 0 to 3 by way of 1 and 2, which are full."""
    mass = torch.zeros(1, 4, 4, dtype=torch.float64)
    for i in range(3):
        mass[0, i, i + 1] = mass[0, i + 1, i] = 0.5
    limit = torch.tensor([[0.0, 0.5, 0.5, 0.5]], dtype=torch.float64)
    flow = split_pairs(torch.zeros(1, 4, dtype=torch.float64), mass, limit)
    assert flow.sum(-1).tolist() == [[0.0, 0.5, 0.5, 0.5]]


def selection_optimum(q, p1, p2):
    """Optimum over the selection weights of two drafts, null drafts included."""
    q, p1, p2 = (torch.cat([x, y]) for x, y in (
        (q, torch.zeros(1)), (p1, 1 - p1.sum(0, True)), (p2, 1 - p2.sum(0, True))))  # fmt: skip
    mass = torch.outer(p1, p2)
    mass = (mass + mass.T).fill_diagonal_(0)
    return best_split(p1 * p2, mass.clamp(min=0), q)


def test_two_drafts_reach_the_programs_optimum():
    target = torch.cat([laws(1, 30, 5), corners(5)[0]])
    proposal = torch.cat([laws(2, 30, 5), corners(5)[1]])
    whole = Canonical(None, None)
    found = whole.acceptance(target, proposal, 2)
    expected = [selection_optimum(q, p, p) for q, p in zip(target, proposal, strict=True)]
    assert (found - float64(expected)).abs().max() < 1e-7
    assert (found - optimal_acceptance(target, proposal, 2)).abs().max() < 1e-12
    other = proposal.roll(1, 0)
    found = whole.acceptance(target, torch.stack([proposal, other], 1), 2)
    expected = [selection_optimum(*row) for row in zip(target, proposal, other, strict=True)]
    assert (found - float64(expected)).abs().max() < 1e-7


@pytest.mark.parametrize(("vocab", "k"), [(5, 1), (5, 2), (3, 3)], ids=str)
def test_bound_is_the_optimum_of_the_transport_program(vocab, k):
    target = torch.cat([laws(3, 10, vocab), corners(vocab)[0]])
    proposal = torch.cat([laws(4, 10, vocab), corners(vocab)[1]])
    proposal[:10:3] *= 0.8
    bound = optimal_acceptance(target, proposal, k)
    expected = [transport(q, p, k) for q, p in zip(target, proposal, strict=True)]
    assert (bound - float64(expected)).abs().max() < 1e-7


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    q=st.lists(st.integers(0, 4), min_size=6, max_size=6).filter(any),
    p=st.lists(st.integers(0, 4), min_size=6, max_size=6).filter(any),
    tokens=st.integers(1, 6),
    alphabet=st.integers(1, 6),
)
def test_truncation_loses_at_most_its_bound(q, p, tokens, alphabet):
    target = torch.tensor([q], dtype=torch.float64) / sum(q)
    proposal = torch.tensor([p], dtype=torch.float64) / sum(p)
    scheme = Canonical(tokens, alphabet)
    lost = optimal_acceptance(target, proposal, 2) - scheme.acceptance(target, proposal, 2)
    score = target - proposal**2
    # what cannot be drafted is neither ranked nor lost
    score = torch.where(proposal > 0, score, -1).sort(-1, descending=True).values
    inside = min(tokens, alphabet)
    assert -1e-12 < float(lost) <= float(score[:, inside:].clamp(min=0).sum()) + 1e-12


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("k", [2, 3])
def test_no_scheme_passes_the_bound(name, k):
    target, proposal = laws(5, 40, 4), laws(6, 40, 4)
    scheme = EVERY[name]
    if name != "without-replacement":
        bound = optimal_acceptance(target, proposal, k)
    else:
        bound = torch.stack(
            [bound_without_replacement(q, p, k) for q, p in zip(target, proposal, strict=True)]
        )
    assert (scheme.acceptance(target, proposal, k) <= bound + 1e-12).all()


def bound_without_replacement(q, p, k):
    drafts = torch.stack(tuples(len(q), k))
    _, law = prepare_laws(q[None], p[None], k)
    x = torch.where(drafts < 0, len(q), drafts)
    law = without_replacement(x, law[:, 0].expand(len(x), -1))
    return joint_acceptance(q, drafts, law.gather(2, x[:, :, None])[:, :, 0].prod(-1))


def test_bound_of_any_law_of_the_drafts():
    """Independent drafts: the sorted prefixes find the worst of all sets."""
    target, proposal = laws(7, 12, 4), laws(8, 12, 4) * 0.9
    for k in (1, 2, 3):
        drafts = torch.stack(tuples(4, k))
        bound = optimal_acceptance(target, proposal, k)
        for q, p, expected in zip(target, proposal, bound, strict=True):
            mass = torch.cat([p, 1 - p.sum(0, True)])
            found = joint_acceptance(q, drafts, mass[drafts].prod(-1))
            assert abs(float(found - expected)) < 1e-12


def test_drawing_without_replacement_is_worth_something():
    """The bound and what is reached rise where a draft would repeat; both stay exact."""
    q = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    p = torch.tensor([[0.7, 0.1, 0.1, 0.1]], dtype=torch.float64)
    without = Recursive(replacement=False)
    assert without.acceptance(q, p, 2) > Recursive().acceptance(q, p, 2) + 0.05
    assert bound_without_replacement(q[0], p[0], 2) > optimal_acceptance(q, p, 2) + 0.05
    law, _ = enumerate_law(without, q, p, 4)
    assert (law - q).abs().max() < 1e-12
    # four draws of four tokens are all of them
    assert abs(float(without.acceptance(q, p, 4)) - 1) < 1e-12


def test_when_the_bound_is_one():
    flat = torch.full((1, 4), 0.25, dtype=torch.float64)
    tilted = torch.tensor([[0.4, 0.2, 0.2, 0.2]], dtype=torch.float64)
    assert can_always_accept(flat, flat, 1)
    assert not can_always_accept(tilted, flat, 1)
    # each token is drafted alone with probability 1/16, less than any has
    assert can_always_accept(tilted, flat, 2)
    assert optimal_acceptance(tilted, flat, 2) == 1
    target, proposal = laws(9, 200, 3), laws(10, 200, 3)
    for k in (1, 2, 3):
        one = optimal_acceptance(target, proposal, k) > 1 - 1e-12
        assert torch.equal(can_always_accept(target, proposal, k), one)
        assert one.any() == (k > 1)


def flat_laws(rows, vocab):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2, rows, vocab, generator=generator, dtype=torch.float64)
    return x / x.sum(-1, keepdim=True)


def test_more_drafts_never_lower_the_acceptance():
    """Truncated rounds of a tournament would, on flat laws; they are skipped."""
    q, p = flat_laws(20, 30)
    for scheme in (Canonical(tokens=2, alphabet=10), Canonical(tokens=3, alphabet=None)):
        found = torch.stack([scheme.acceptance(q, p, k) for k in range(1, 7)])
        assert (found.diff(dim=0) >= -1e-12).all()
    q, p = flat_laws(40, 4)
    few = Canonical(tokens=1, alphabet=2)
    assert (few.acceptance(q, p, 3) == few.acceptance(q, p, 2)).any()
    law, accepted = enumerate_law(few, q, p, 3)
    assert (law - q).abs().max() < 1e-12
    assert (accepted - few.acceptance(q, p, 3)).abs().max() < 1e-12


def test_the_papers_order_fails_on_flat_targets():
    """With few tokens in the program a flat target does better with K-SEQ."""
    q, p = flat_laws(20, 60)
    few = Canonical(tokens=3, alphabet=None).acceptance(q, p, 2).mean()
    all_of_it = Canonical(tokens=None, alphabet=None).acceptance(q, p, 2).mean()
    kseq = EVERY["kseq"].acceptance(q, p, 2).mean()
    assert few < kseq < all_of_it
