"""Rounding of distributions in the models' dtypes adds no null draw."""

import pytest
import torch
from helpers.runs.verify_cases import EVERY
from helpers.targets import pairs

from csd.research.verify import optimal_acceptance
from csd.research.verify.scheme import prepare_distributions

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
GAPS = [6, 10, 13, 16]
V = 6


def peaked(gap, dtype, seed):
    """[1, V]: softmax in `dtype` of one logit `gap` above the rest, which differ a little."""
    logits = torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 0.3
    logits[seed % V] = logits.max() + gap
    return logits.to(dtype).softmax(-1)[None]


def drawn_distribution(scheme, name, target, proposal, k):
    """Distributions [B, V] of the output for drafts drawn from `proposal` by torch.multinomial.

    The weights are taken as they are, over their sum; nothing is ever drawn that is no token.
    """
    drafts = torch.cartesian_prod(*k * [torch.arange(V)])
    rows, n = target.shape[0], len(drafts)
    x, row = drafts.repeat(rows, 1), torch.arange(rows).repeat_interleave(n)
    left, chance = proposal[row].double(), torch.ones(rows * n, dtype=torch.float64)
    for token in x.T[:, :, None]:
        weight = left.gather(1, token)[:, 0]
        chance *= torch.where(weight > 0, weight / left.sum(-1), 0)
        if name == "without-replacement":
            left = left.scatter(1, token, 0)
    assert (chance.view(rows, n).sum(1) - 1).abs().max() < 1e-12
    x, row, chance = x[chance > 0], row[chance > 0], chance[chance > 0]
    probs = scheme.outcome(x, target[row], proposal[row]).probs(x)
    found = torch.zeros(rows, V, dtype=torch.float64)
    return found.index_add(0, row, chance[:, None] * probs)


@pairs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("k", [2, 3])
def test_sharp_proposals_keep_the_target_distribution(name, gap, dtype, k):
    target = torch.cat([peaked(2, dtype, seed + 10) for seed in range(3)])
    proposal = torch.cat([peaked(gap, dtype, seed) for seed in range(3)])
    probs = drawn_distribution(EVERY[name], name, target, proposal, k)
    whole = target.double() / target.double().sum(-1, keepdim=True)
    assert (probs - whole).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gap", GAPS)
def test_rounding_is_no_mass_of_no_token(gap, dtype):
    for seed in range(20):
        _, p = prepare_distributions(peaked(2, dtype, seed), peaked(gap, dtype, seed), 2)
        assert (p[:, :, -1] == 0).all()
        assert (p.sum(-1) - 1).abs().max() < 1e-15


def test_the_sum_of_a_large_vocabulary_is_whole():
    """float32 and bfloat16 over 50,000 tokens, flat and peaked."""
    logits = torch.randn(4, 50_000, generator=torch.Generator().manual_seed(0))
    logits[2:] *= 6
    for dtype in (torch.bfloat16, torch.float32):
        probs = logits.to(dtype).softmax(-1)
        q, p = prepare_distributions(probs, probs, 1)
        assert (p[:, :, -1] == 0).all()
        assert (q[:, :-1] - p[:, 0, :-1]).abs().max() < 1e-15


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mass_that_a_proposal_does_lack_stays_a_null_draw(dtype):
    target = peaked(2, dtype, 1)
    proposal = (peaked(1, torch.float64, 2) * 0.875).to(dtype)
    _, p = prepare_distributions(target, proposal, 2)
    assert (p[:, :, -1] - 0.125).abs().max() < 4 * torch.finfo(dtype).eps
    bound = optimal_acceptance(target, proposal, 2)
    assert bound < optimal_acceptance(target, proposal.double() / proposal.double().sum(), 2)
