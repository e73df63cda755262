"""Two samples of three tokens each under a known law, and how far counts are from it."""

import torch
from scipy.stats import chi2
from scripted import LastToken, engine

import csd

TOKENS, POSITIONS, LETTERS = 3, 3, 28
VOCAB = TOKENS + LETTERS
# word pairs of the prompt draft from the first step on: 2 1, 1 2 or 1 0, 0 1 or 0 2
TAIL = [0, 1, 2, 1, 2, 1, 0, 2]

# [position, last token, next token]. The first draft, 1 after 2, is mostly wrong and 0 comes in its
# place; under it the second word may have drafted a 0, and then the graph has seen what follows 0
# at the last position, unlike what follows it at the second. So the next step's proposal tells what
# that word was, which must not draw from it again.
LAW = torch.tensor(
    [
        [[0.8, 0.1, 0.1]] * 3,
        [[0.1, 0.45, 0.45], [0.4, 0.2, 0.4], [0.3, 0.5, 0.2]],
        [[0.02, 0.02, 0.96], [0.1, 0.3, 0.6], [0.5, 0.25, 0.25]],
    ],
    dtype=torch.float64,
)


def logits_of(token, position):
    logits = torch.full((token.shape[0], VOCAB), -torch.inf, dtype=torch.float64)
    place = (position - (2 + len(TAIL))).clamp(0, POSITIONS - 1)
    logits[:, :TOKENS] = LAW[place, token.clamp(max=TOKENS - 1)].log()
    return logits


def prompts(count):
    letters = torch.cartesian_prod(*[torch.arange(TOKENS, VOCAB)] * 3)
    return [[*x, *TAIL] for x in letters[:count].tolist()]


def cell_probabilities():
    one = torch.einsum("a,ab,abc->abc", LAW[0, 0], LAW[1], LAW[2][None].expand(3, 3, 3)).flatten()
    return torch.outer(one, one).flatten()


def draw(replicates, max_slots, **options):
    """Counts [729] of the pairs of samples, and the accepted share of what was drafted."""
    e = engine(LastToken(logits_of, VOCAB), max_slots=max_slots)
    results = csd.generate(
        e, prompts(replicates), num_samples=2, seed=20240, max_new_tokens=POSITIONS, **options
    )
    code = (torch.tensor([r.tokens for r in results]) * torch.tensor([9, 3, 1])).sum(-1)
    accepted, proposed = (
        sum(getattr(r.stats, f"nodes_{what}") for r in results) for what in ("accepted", "proposed")
    )
    return torch.bincount(code[:, 0] * 27 + code[:, 1], minlength=729), accepted / max(proposed, 1)


def p_value(observed):
    """Chi-square with cells of expectation below 5 pooled, of the pairs and of single samples."""
    expected = cell_probabilities() * int(observed.sum())
    both = observed.view(27, 27)
    one = cell_probabilities().view(27, 27).sum(1) * 2 * int(observed.sum())
    return min(_p_value(observed, expected), _p_value(both.sum(0) + both.sum(1), one))


def _p_value(observed, expected):
    small = expected < 5
    observed = torch.cat([observed[~small], observed[small].sum()[None]]).double()
    expected = torch.cat([expected[~small], expected[small].sum()[None]]).clamp(min=1e-9)
    return float(chi2.sf(float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1))
