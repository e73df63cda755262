"""Two samples of three tokens each under a known distribution, and how far counts are from it."""

import torch
from helpers.models.scripted import LastToken, engine
from scipy.stats import chi2

import csd

TOKENS, POSITIONS = 3, 3
# prompts are three letters of their own, which the target ignores, and a tail
LETTERS = 28
VOCAB = TOKENS + LETTERS


class JointDistribution:
    """distribution: [position, last token, next token]; tail: what every prompt ends in."""

    def __init__(self, probs, tail=()):
        self.probs, self.tail = torch.tensor(probs, dtype=torch.float64), list(tail)
        # of a sample, [27]
        first, second, third = self.probs
        self.one = torch.einsum("a,ab,bc->abc", first[0], second, third).flatten()
        # of a pair of samples, [729]
        self.pair = torch.outer(self.one, self.one).flatten()

    def logits(self, token, position):
        logits = torch.full((token.shape[0], VOCAB), -torch.inf, dtype=torch.float64)
        place = (position - (2 + len(self.tail))).clamp(0, POSITIONS - 1)
        logits[:, :TOKENS] = self.probs[place, token.clamp(max=TOKENS - 1)].log()
        return logits

    def draw(self, replicates, max_slots, together=None, kernels=None, **options):
        """Counts [729] of the pairs of samples, tokens accepted and tokens drafted."""
        model = LastToken(self.logits, VOCAB)
        e = engine(model, max_slots=max_slots, together=together, kernels=kernels)
        letters = torch.cartesian_prod(*[torch.arange(TOKENS, VOCAB)] * 3)
        prompts = [[*x, *self.tail] for x in letters[:replicates].tolist()]
        results = csd.generate(
            e, prompts, num_samples=2, seed=20240, max_new_tokens=POSITIONS, **options
        )
        code = (torch.tensor([r.tokens for r in results]) * torch.tensor([9, 3, 1])).sum(-1)
        observed = torch.bincount(code[:, 0] * 27 + code[:, 1], minlength=729)
        return (
            observed,
            sum(r.stats.nodes_accepted for r in results),
            sum(r.stats.nodes_proposed for r in results),
        )

    def p_value(self, observed):
        """The smaller one of the pairs and of single samples."""
        both, count = observed.view(27, 27), int(observed.sum())
        return min(
            _p_value(observed, self.pair * count),
            _p_value(both.sum(0) + both.sum(1), self.one * 2 * count),
        )


def _p_value(observed, expected):
    """Chi-square with cells of expectation below 5 pooled."""
    small = expected < 5
    observed = torch.cat([observed[~small], observed[small].sum()[None]]).double()
    expected = torch.cat([expected[~small], expected[small].sum()[None]]).clamp(min=1e-9)
    return float(chi2.sf(float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1))
