"""Input that verification schemes refuse, and input that they accept."""

import pytest
import torch
from helpers.runs.verify_cases import EVERY, distributions
from helpers.targets import values

from csd.research.verify import Canonical, KSeq, Noise, joint_acceptance, optimal_acceptance

Q = distributions(1, 2, 4)
P = distributions(2, 2, 4)
X = torch.tensor([[0, 1], [2, -1]])


def with_entry(probs, value):
    probs = probs.clone()
    probs[1, 2] = value
    return probs


# every scheme has one check
@values
@pytest.mark.parametrize(
    ("drafts", "target", "proposal", "message"),
    [
        (X, Q * 1.002, P, r"target must sum to 1 within 0.001, got 1.002"),
        (X, Q * 0.998, P, r"target must sum to 1 within 0.001, got 0.998"),
        (X, Q, P * 1.002, r"proposal must sum to at most 1 \+ 0.001, got 1.002"),
        (X, with_entry(Q, -0.1), P, "target must be finite and not negative, got -0.1"),
        (X, Q, with_entry(P, -1e-9), "proposal must be finite and not negative"),
        (X, with_entry(Q, torch.nan), P, "target must be finite and not negative, got nan"),
        (X, Q, with_entry(P, torch.inf), "proposal must be finite and not negative, got inf"),
        (X, Q[0], P, r"target must have shape \[B, V\], got \(4,\)"),
        (X[0], Q, P, r"drafts must have shape \(2, K\), got \(2,\)"),
        (X[:1], Q, P, r"drafts must have shape \(2, K\), got \(1, 2\)"),
        (X[:, :0], Q, P, r"drafts must have shape \(2, K\), got \(2, 0\)"),
        (X.double(), Q, P, "drafts must be integers, got torch.float64"),
        (X + 2, Q, P, r"drafts must lie in -1 .. 3, got 1 .. 4"),
        (X - 1, Q, P, r"drafts must lie in -1 .. 3, got -2 .. 1"),
        (X, Q, P[:, :3], r"proposal must have shape \(2, 4\) or \(2, 2, 4\), got \(2, 3\)"),
        (X, Q, P[:, None], r"proposal must have shape \(2, 4\) or \(2, 2, 4\), got \(2, 1, 4\)"),
    ],
    ids=lambda x: x[:24] if isinstance(x, str) else "",
)
@pytest.mark.parametrize("name", EVERY)
def test_refused(name, drafts, target, proposal, message):
    with pytest.raises(ValueError, match=message):
        EVERY[name].outcome(drafts, target, proposal)


def test_refused_by_some():
    different = torch.stack([P, P.roll(1, 0)], 1)
    with pytest.raises(ValueError, match="the same for every draft under 'kseq'"):
        KSeq().outcome(X, Q, different)
    with pytest.raises(ValueError, match="under 'recursive without replacement'"):
        EVERY["without-replacement"].acceptance(Q, different, 2)
    with pytest.raises(ValueError, match="at most 1048576 tuples of drafts to enumerate"):
        EVERY["without-replacement"].acceptance(distributions(1, 1, 40), distributions(2, 1, 40), 4)
    with pytest.raises(ValueError, match="k must be a whole number of at least 1, got 0"):
        optimal_acceptance(Q, P, 0)
    with pytest.raises(ValueError, match=r"proposal must have shape \[B, V\]"):
        optimal_acceptance(Q, different, 2)
    with pytest.raises(ValueError, match="tokens must be at least 1 or None, got 0"):
        Canonical(tokens=0)
    with pytest.raises(ValueError, match="tokens must be at most 256, got 301"):
        Canonical(None, None).acceptance(distributions(1, 1, 300), distributions(2, 1, 300), 2)
    with pytest.raises(ValueError, match="target must have at most 16 tokens, got 17"):
        joint_acceptance(distributions(1, 1, 17)[0], X, torch.ones(2))
    with pytest.raises(ValueError, match="target must have at most 16 tokens, got 17"):
        optimal_acceptance(distributions(1, 1, 17), distributions(2, 1, 17), 2, replacement=False)
    with pytest.raises(ValueError, match=r"proposal must have shape \[B, V\]"):
        optimal_acceptance(Q, different, 2, replacement=False)


def test_sums_within_tolerance_are_taken():
    for name in EVERY:
        near = EVERY[name].outcome(X, Q * 1.0009, P * 1.0009)
        exact = EVERY[name].outcome(X, Q, P)
        assert (near.probs(X) - exact.probs(X)).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_low_precision_and_excluded_tokens_stay_finite(name, dtype):
    """Logits of -inf, rows of one token, proposals that miss the target."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 6, generator=generator) * 12
    logits[0, 1:] = -torch.inf
    logits[1, :3] = -torch.inf
    logits[2] = 0
    target, proposal = logits.softmax(-1).to(dtype), logits.roll(1, 0).softmax(-1).to(dtype)
    drafts = torch.randint(-1, 6, (8, 3), generator=generator)
    scheme = EVERY[name]
    outcome = scheme.outcome(drafts, target, proposal)
    probs = outcome.probs(drafts)
    assert probs.isfinite().all() and (probs >= 0).all() and (outcome.accept >= 0).all()
    assert (probs.sum(-1) - 1).abs().max() < 1e-9
    assert (probs[target == 0] == 0).all()
    accepted = scheme.acceptance(target, proposal, 3)
    assert ((accepted >= 0) & (accepted <= 1 + 1e-12)).all()
    bound = optimal_acceptance(target, proposal, 3)
    assert ((bound >= 0) & (bound <= 1)).all()
    u = torch.rand(8, 5, generator=generator, dtype=torch.float64)
    for words in (u, torch.zeros_like(u), torch.ones_like(u)):
        decision = scheme.decide(
            drafts, target, proposal, Noise(words[:, 0], words[:, 1:4], words[:, 4])
        )
        assert (target.gather(1, decision.token[:, None]) > 0).all()
