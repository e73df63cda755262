"""Targets and proposals for the tests of verification schemes, and distributions by enumeration."""

from itertools import product

import torch
from hypothesis import strategies as st

from csd.research.verify import Canonical, KSeq, Match, Recursive, Single
from csd.research.verify.scheme import prepare_distributions

EVERY = {
    "match": Match(),
    "single": Single(),
    "recursive": Recursive(),
    "without-replacement": Recursive(replacement=False),
    "kseq": KSeq(),
    "canonical": Canonical(tokens=None, alphabet=None),
    "canonical-s2": Canonical(tokens=2, alphabet=None),
    "canonical-s1-alphabet2": Canonical(tokens=1, alphabet=2),
    "canonical-alphabet3": Canonical(tokens=None, alphabet=3),
}


def distributions(seed: int, rows: int, vocab: int, zeros: float = 0.3) -> torch.Tensor:
    """[rows, vocab] float64: peaked and flat distributions, some entries zero."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    x = random(rows, vocab) ** (1 + 6 * random(rows, 1)) * (random(rows, vocab) > zeros)
    x[torch.arange(rows), torch.randint(vocab, (rows,), generator=generator)] += 0.05
    return x / x.sum(-1, keepdim=True)


def corners(vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets and proposals that touch every edge: equal, one-hot, disjoint, ties, missing mass."""
    one = torch.eye(vocab, dtype=torch.float64)
    flat = torch.full((vocab,), 1 / vocab, dtype=torch.float64)
    low = torch.where(torch.arange(vocab) < vocab // 2, 1.0, 0.0).double()
    low, high = low / low.sum(), (1 - low) / (1 - low).sum()
    pairs = [
        (flat, flat),
        (one[0], one[0]),
        (one[0], one[1]),
        (low, high),
        (high, low),
        (flat, one[1]),
        (one[1], flat),
        (flat, low),
        (low, flat),
        (flat, flat / 2),
        (one[0], flat / 4),
        (flat, one[0] / 2),
        (low, high / 2),
        (flat, torch.zeros(vocab, dtype=torch.float64)),
    ]
    return tuple(torch.stack(x) for x in zip(*pairs, strict=True))


def tuples(vocab: int, k: int):
    """All drafts of k tokens, null included."""
    return [torch.tensor(t) for t in product(range(-1, vocab), repeat=k)]


def enumerate_output(scheme, target, proposal, k):
    """Distribution [B, V] of the output and acceptance [B], summed over all drafts."""
    rows, vocab = target.shape
    _, p = prepare_distributions(target, proposal, k)
    drafts = torch.stack(tuples(vocab, k))
    n = len(drafts)
    drafts = drafts.repeat(rows, 1)
    q, prior, p = (x.repeat_interleave(n, 0) for x in (target, proposal, p))
    chance = scheme.draft_probs(torch.where(drafts < 0, vocab, drafts), p)
    outcome = scheme.outcome(drafts, q, prior)
    probs = (chance[:, None] * outcome.probs(drafts)).view(rows, n, vocab).sum(1)
    return probs, (chance * outcome.accept.sum(-1)).view(rows, n).sum(1)


def _weights(vocab: int):
    """Small whole weights: ties and zeros are frequent."""
    return st.lists(st.integers(0, 4), min_size=vocab, max_size=vocab)


@st.composite
def small_pairs(draw, vocab: int, proposals: int = 1):
    """target [1, vocab] and proposal [1, vocab], or [1, proposals, vocab] if more than one.

    Any small weights, and on purpose: one-hot, disjoint supports, equal pairs, missing mass.
    """
    kind = draw(st.sampled_from(["any", "one-hot target", "one-hot proposal", "disjoint", "equal"]))
    one = st.integers(0, vocab - 1).map(lambda i: [int(i == j) for j in range(vocab)])
    q = draw(one if kind == "one-hot target" else _weights(vocab).filter(any))
    ps = []
    for _ in range(proposals):
        p = draw(one if kind == "one-hot proposal" else _weights(vocab))
        if kind == "disjoint":
            p = [0 if a else b for a, b in zip(q, p, strict=True)]
        if kind == "equal":
            p = q
        missing = draw(st.sampled_from([0, 0, 1, 3]))
        ps.append(torch.tensor(p, dtype=torch.float64) / max(sum(p) + missing, 1))
    target = torch.tensor([q], dtype=torch.float64) / sum(q)
    return target, ps[0][None] if proposals == 1 else torch.stack(ps)[None]
