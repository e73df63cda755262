"""Every scheme's output is distributed as the target: exactly, by enumeration over drafts."""

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
from helpers.targets import few
from hypothesis import given, settings
from hypothesis import strategies as st

from csd.research.verify import Canonical, Match, Noise, coupled_drafts, fixed_drafts, make_scheme
from csd.research.verify.canonical import Choice
from csd.research.verify.scheme import prepare_distributions

pytestmark = pytest.mark.quick

SIZES = [(2, 1), (5, 1), (3, 2), (5, 2), (3, 3), (2, 4)]
names = pytest.mark.parametrize("name", EVERY)


@names
@pytest.mark.parametrize(("vocab", "k"), SIZES, ids=lambda x: str(x))
def test_output_has_the_target_distribution(name, vocab, k):
    target = torch.cat([distributions(1, 24, vocab), corners(vocab)[0]])
    proposal = torch.cat([distributions(2, 24, vocab), corners(vocab)[1]])
    proposal[:24:3] *= 0.6
    probs, accepted = enumerate_output(EVERY[name], target, proposal, k)
    assert (probs - target).abs().max() < 1e-12
    expected = EVERY[name].acceptance(target, proposal, k)
    assert (accepted - expected).abs().max() < 1e-12


@pytest.mark.parametrize("name", [n for n, s in EVERY.items() if not s.same_proposals])
@pytest.mark.parametrize("k", [2, 3])
def test_output_has_the_target_law_under_different_proposals(name, k):
    vocab, rows = 4, 20
    target = distributions(3, rows, vocab)
    proposal = torch.stack([distributions(10 + i, rows, vocab) for i in range(k)], 1)
    proposal[::4, 0] *= 0.5
    probs, accepted = enumerate_output(EVERY[name], target, proposal, k)
    assert (probs - target).abs().max() < 1e-12
    assert (accepted - EVERY[name].acceptance(target, proposal, k)).abs().max() < 1e-12


@few(4)
@names
@pytest.mark.parametrize(("vocab", "k"), [(4, 2), (3, 3)], ids=str)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_enumerated_small_distributions(name, vocab, k, data):
    """Zeros, ties, one-hot, disjoint supports, missing mass; one proposal or one a draft."""
    several = not EVERY[name].same_proposals and data.draw(st.booleans())
    target, proposal = data.draw(small_pairs(vocab, k if several else 1))
    probs, accepted = enumerate_output(EVERY[name], target, proposal, k)
    assert (probs - target).abs().max() < 1e-12
    assert (accepted - EVERY[name].acceptance(target, proposal, k)).abs().max() < 1e-12


def test_any_weights_of_the_choice_keep_the_target(monkeypatch):
    """p_I is computed from the weights in use, so they need not be the program's."""
    right = Canonical.choose

    def skewed(self, q, p1, p2):
        choice = right(self, q, p1, p2)
        s = choice.weight.shape[1]
        generator = torch.Generator().manual_seed(7)
        weight = torch.rand(s, s, generator=generator, dtype=torch.float64)
        weight = (weight.triu(1) + (1 - weight.triu(1).mT).tril(-1)).expand_as(choice.weight)
        wrong = Choice(choice.probs, choice.rank, weight)
        probs = torch.zeros_like(q)
        A = q.shape[1]
        for i in range(A):
            for j in range(A):
                x, y = (torch.full((q.shape[0],), v) for v in (i, j))
                mass, wins = p1[:, i] * p2[:, j], wrong.wins(x, y)
                probs[:, i] += mass * wins
                probs[:, j] += mass * (1 - wins)
        return Choice(probs, choice.rank, weight)

    target, proposal = distributions(1, 16, 4), distributions(2, 16, 4)
    best = Canonical(None, None).acceptance(target, proposal, 2)
    monkeypatch.setattr(Canonical, "choose", skewed)
    probs, accepted = enumerate_output(Canonical(None, None), target, proposal, 2)
    assert (probs - target).abs().max() < 1e-12
    assert (accepted < best - 1e-3).any()


def test_the_law_of_the_winner_is_that_of_the_weights():
    """p_I, which every later step uses, by enumeration of both drafts."""
    target, one, two = distributions(1, 40, 5), distributions(2, 40, 5), distributions(3, 40, 5)
    q, p1, p2 = (torch.nn.functional.pad(x, (0, 1)) for x in (target, one * 0.7, two))
    p1[:, -1] = 0.3
    for tokens, alphabet in [(None, None), (3, None), (2, 4), (1, 1), (5, 2)]:
        choice = Canonical(tokens, alphabet).choose(q, p1, p2)
        probs = torch.zeros_like(q)
        for i in range(6):
            for j in range(6):
                x, y = (torch.full((40,), v) for v in (i, j))
                wins = choice.wins(x, y)
                probs[:, i] += p1[:, i] * p2[:, j] * wins
                probs[:, j] += p1[:, i] * p2[:, j] * (1 - wins)
        assert (probs - choice.probs).abs().max() < 1e-12


@few(2)
@names
def test_draws_reproduce_the_enumerated_distribution(name):
    """Stratified words, all drafts in one batch: shares are probabilities, and together the target.

    Words are a Sobol sequence, the rest of a row's arguments differ from row to row.
    """
    vocab, k, points = 3, 2, 1 << 12
    scheme = EVERY[name]
    u = torch.quasirandom.SobolEngine(k + 2).draw(points, dtype=torch.float64)
    u = (u + 0.5 / points).clamp(max=1 - 1e-9)
    drafts = torch.stack(tuples(vocab, k))
    n = len(drafts)
    many = drafts.repeat_interleave(points, 0)
    words = u.repeat(n, 1)
    noise = Noise(words[:, 0], words[:, 1 : k + 1], words[:, k + 1])
    target, proposal = distributions(5, 3, vocab, zeros=0.2), distributions(6, 3, vocab, zeros=0.2)
    proposal[::2] *= 0.7
    for q, p in zip(target, proposal, strict=True):
        decision = scheme.decide(many, q.expand(len(many), -1), p.expand(len(many), -1), noise)
        token, draft = decision.token.view(n, points), decision.draft.view(n, points)
        share = torch.nn.functional.one_hot(token, vocab).double().mean(1)
        outcome = scheme.outcome(drafts, q.expand(n, -1), p.expand(n, -1))
        assert (share - outcome.probs(drafts)).abs().max() < 3e-3
        taken = (draft[:, :, None] == torch.arange(k)).double().mean(1)
        assert (taken.sum(-1) - outcome.accept.sum(-1)).abs().max() < 3e-3
        # equal drafts may be credited to either
        differ = drafts[:, 0] != drafts[:, 1]
        assert (taken - outcome.accept)[differ].abs().max() < 3e-3
        hit = draft >= 0
        assert torch.equal(drafts.gather(1, draft.clamp(min=0))[hit], token[hit])
        # over the distribution of the drafts it is the target's
        _, probs = prepare_distributions(q[None], p[None], k)
        x = torch.where(drafts < 0, vocab, drafts)
        chance = scheme.draft_probs(x, probs.expand(n, -1, -1))
        assert (chance @ share - q).abs().max() < 3e-3
        assert abs(float(chance @ taken.sum(-1) - scheme.acceptance(q[None], p[None], k))) < 3e-3


def test_match_with_the_targets_own_noise():
    """Drafts that share the target's noise hit more often than independent ones."""
    generator = torch.Generator().manual_seed(0)
    q, p = distributions(1, 1, 6, zeros=0)[0], distributions(2, 1, 6, zeros=0)[0]
    p = 0.5 * (p + q)
    many = 20_000
    gumbel = -(-torch.rand(many, 6, generator=generator, dtype=torch.float64).log()).log()
    token = (q.log() + gumbel).argmax(-1)
    proposal = p.expand(many, -1)
    for k in (1, 2, 4):
        drafts = coupled_drafts(proposal, gumbel, k)
        hits = float((drafts == token[:, None]).any(-1).double().mean())
        assert hits > float(Match().acceptance(q[None], p[None], k)) + 0.02
    # one coupled draft: sum over t of 1 / sum over s of max(q_s / q_t, p_s / p_t)
    each = torch.maximum(q[None] / q[:, None], p[None] / p[:, None]).sum(-1)
    hits = (coupled_drafts(proposal, gumbel, 1)[:, 0] == token).double().mean()
    # four standard errors
    assert abs(float(hits - (1 / each).sum())) < 4 * 0.0036


def test_drafts_of_a_short_proposal_are_padded():
    p = torch.tensor([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]])
    assert fixed_drafts(p, 3).tolist() == [[0, 2, -1], [1, -1, -1]]
    assert fixed_drafts(p, 5).tolist() == [[0, 2, -1, -1, -1], [1, -1, -1, -1, -1]]
    gumbel = torch.tensor([[0.0, 9.0, 1.0], [9.0, 0.0, 9.0]])
    assert coupled_drafts(p, gumbel, 2).tolist() == [[2, 0], [1, -1]]


@pytest.mark.parametrize("name", ["match", "canonical", "recursive", "kseq", "single"])
def test_make_scheme(name):
    assert make_scheme(name).name == name


def test_make_scheme_error_lists_names():
    with pytest.raises(ValueError, match=r"name must be one of 'match', 'canonical'.*got 'best'"):
        make_scheme("best")
