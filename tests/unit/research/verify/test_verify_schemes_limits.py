"""Acceptance against linear programs solved by scipy, and against the bounds."""

import pytest
import torch
from helpers.runs.verify_cases import (
    EVERY,
    corners,
    distributions,
    enumerate_output,
    small_pairs,
    tuples,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import best_split, distinct, float64, independent, selection_optimum, transport

from csd.research.verify import (
    Canonical,
    Recursive,
    can_always_accept,
    joint_acceptance,
    optimal_acceptance,
)
from csd.research.verify.canonical import split_pairs


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


SIZES = [(None, None), (3, None), (2, 4), (None, 3), (1, 2)]


@pytest.mark.parametrize(("tokens", "alphabet"), SIZES, ids=str)
@pytest.mark.parametrize("same", [True, False], ids=["one-proposal", "two-proposals"])
def test_two_drafts_reach_the_programs_optimum(tokens, alphabet, same):
    target, one, two = distributions(1, 20, 5), distributions(2, 20, 5), distributions(12, 20, 5)
    one[::4] *= 0.7
    two = one if same else two
    if tokens is alphabet is None:
        # ranks do not matter, so neither do ties
        target, corner = torch.cat([target, corners(5)[0]]), corners(5)[1]
        one, two = torch.cat([one, corner]), torch.cat([two, corner if same else corner.roll(1, 0)])
    proposal = one if same else torch.stack([one, two], 1)
    found = Canonical(tokens, alphabet).acceptance(target, proposal, 2)
    expected = float64(
        [selection_optimum(*row, tokens, alphabet) for row in zip(target, one, two, strict=True)]
    )
    # a round that lowers the acceptance of the first draft alone is skipped
    alone = torch.minimum(target, one).sum(-1)
    assert (found - expected.maximum(alone)).abs().max() < 1e-7
    assert (expected > alone)[:20].float().mean() > 0.7
    if same and tokens is alphabet is None:
        assert (found - optimal_acceptance(target, one, 2)).abs().max() < 1e-12


@settings(max_examples=40, deadline=None, derandomize=True)
@given(pair=small_pairs(4, 2))
def test_two_drafts_of_any_small_laws_reach_the_programs_optimum(pair):
    target, proposal = pair
    found = float(Canonical(None, None).acceptance(target, proposal, 2))
    assert abs(found - selection_optimum(target[0], *proposal[0])) < 1e-7
    # the selection is not a restriction: any coupling of drafts and output does as well
    drafts = torch.stack(tuples(4, 2))
    mass = torch.cat([proposal[0], (1 - proposal[0].sum(-1, keepdim=True)).clamp(min=0)], 1)
    chance = mass[0][drafts[:, 0]] * mass[1][drafts[:, 1]]
    assert abs(found - transport(target[0], drafts, chance)) < 1e-7


@pytest.mark.parametrize(("vocab", "k"), [(5, 1), (5, 2), (3, 3)], ids=str)
def test_bound_is_the_optimum_of_the_transport_program(vocab, k):
    target = torch.cat([distributions(3, 10, vocab), corners(vocab)[0]])
    proposal = torch.cat([distributions(4, 10, vocab), corners(vocab)[1]])
    proposal[:10:3] *= 0.8
    bound = optimal_acceptance(target, proposal, k)
    expected = [transport(q, *independent(p, k)) for q, p in zip(target, proposal, strict=True)]
    assert (bound - float64(expected)).abs().max() < 1e-7


@pytest.mark.parametrize(("vocab", "k"), [(4, 2), (3, 3)], ids=str)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_bound_of_any_small_law_is_the_transport_programs(vocab, k, data):
    target, proposal = data.draw(small_pairs(vocab))
    bound = float(optimal_acceptance(target, proposal, k))
    assert abs(bound - transport(target[0], *independent(proposal[0], k))) < 1e-7
    # and where every output can be a draft, it says so
    assert bool(can_always_accept(target, proposal, k)) == (bound > 1 - 1e-12)


@pytest.mark.parametrize(("vocab", "k"), [(4, 2), (3, 3), (4, 3)], ids=str)
def test_bound_without_replacement_is_the_transport_programs(vocab, k):
    target = torch.cat([distributions(13, 8, vocab), corners(vocab)[0]])
    proposal = torch.cat([distributions(14, 8, vocab), corners(vocab)[1]])
    proposal[:8:3] *= 0.8
    for q, p in zip(target, proposal, strict=True):
        drafts, chance = distinct(p, k)
        assert abs(float(chance.sum()) - 1) < 1e-12
        bound = float(optimal_acceptance(q[None], p[None], k, replacement=False))
        assert abs(bound - transport(q, drafts, chance)) < 1e-7
        assert abs(bound - float(joint_acceptance(q, drafts, chance))) < 1e-12


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), tokens=st.integers(1, 6), alphabet=st.integers(1, 6))
def test_truncation_loses_at_most_its_bound(data, tokens, alphabet):
    """One proposal or two, some mass missing."""
    several = data.draw(st.booleans())
    target, proposal = data.draw(small_pairs(6, 2 if several else 1))
    one, two = proposal[:, 0] if several else proposal, proposal[:, 1] if several else proposal
    best = Canonical(None, None).acceptance(target, proposal, 2)
    lost = best - Canonical(tokens, alphabet).acceptance(target, proposal, 2)
    # what cannot be drafted is neither ranked nor lost
    score = torch.where(one + two > 0, target - one * two, -1).sort(-1, descending=True).values
    inside = min(tokens, alphabet)
    assert -1e-12 < float(lost) <= float(score[:, inside:].clamp(min=0).sum()) + 1e-12


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("k", [2, 3])
def test_no_scheme_passes_the_bound(name, k):
    target, proposal = distributions(5, 40, 4), distributions(6, 40, 4)
    scheme = EVERY[name]
    bound = optimal_acceptance(target, proposal, k, replacement=name != "without-replacement")
    assert (scheme.acceptance(target, proposal, k) <= bound + 1e-12).all()


def test_bound_of_any_law_of_the_drafts():
    """Independent drafts: the sorted prefixes find the worst of all sets."""
    target, proposal = distributions(7, 12, 4), distributions(8, 12, 4) * 0.9
    for k in (1, 2, 3):
        bound = optimal_acceptance(target, proposal, k)
        for q, p, expected in zip(target, proposal, bound, strict=True):
            found = joint_acceptance(q, *independent(p, k))
            assert abs(float(found - expected)) < 1e-12


def test_drawing_without_replacement_is_worth_something():
    """The bound and what is reached rise where a draft would repeat; both stay exact."""
    q = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    p = torch.tensor([[0.7, 0.1, 0.1, 0.1]], dtype=torch.float64)
    without = Recursive(replacement=False)
    assert without.acceptance(q, p, 2) > Recursive().acceptance(q, p, 2) + 0.05
    assert optimal_acceptance(q, p, 2, replacement=False) > optimal_acceptance(q, p, 2) + 0.05
    probs, _ = enumerate_output(without, q, p, 4)
    assert (probs - q).abs().max() < 1e-12
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
    target, proposal = distributions(9, 200, 3), distributions(10, 200, 3)
    for k in (1, 2, 3):
        one = optimal_acceptance(target, proposal, k) > 1 - 1e-12
        assert torch.equal(can_always_accept(target, proposal, k), one)
        assert one.any() == (k > 1)


def flat_distributions(rows, vocab):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2, rows, vocab, generator=generator, dtype=torch.float64)
    return x / x.sum(-1, keepdim=True)


def test_more_drafts_never_lower_the_acceptance():
    """Truncated rounds of a tournament would, on flat distributions; they are skipped."""
    q, p = flat_distributions(20, 30)
    for scheme in (Canonical(tokens=2, alphabet=10), Canonical(tokens=3, alphabet=None)):
        found = torch.stack([scheme.acceptance(q, p, k) for k in range(1, 7)])
        assert (found.diff(dim=0) >= -1e-12).all()
    q, p = flat_distributions(40, 4)
    few = Canonical(tokens=1, alphabet=2)
    assert (few.acceptance(q, p, 3) == few.acceptance(q, p, 2)).any()
    probs, accepted = enumerate_output(few, q, p, 3)
    assert (probs - q).abs().max() < 1e-12
    assert (accepted - few.acceptance(q, p, 3)).abs().max() < 1e-12


def test_the_papers_order_fails_on_flat_targets():
    """With few tokens in the program a flat target does better with K-SEQ."""
    q, p = flat_distributions(20, 60)
    few = Canonical(tokens=3, alphabet=None).acceptance(q, p, 2).mean()
    all_of_it = Canonical(tokens=None, alphabet=None).acceptance(q, p, 2).mean()
    kseq = EVERY["kseq"].acceptance(q, p, 2).mean()
    assert few < kseq < all_of_it
