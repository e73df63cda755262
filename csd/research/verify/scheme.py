"""Base class of the verification schemes: interface, input checks and the null draw.

A scheme turns K drafts x_1 .. x_K of a token, drawn from p_1 .. p_K, into one token distributed as
q. It either takes one of the drafts or draws from a residual distribution. Given the drafts, a
scheme is a `SchemePlan`; summed over the drafts' distribution, a plan's outcome is q, exactly.

Mass that a proposal lacks is a null draw: an atom after the vocabulary with target probability 0,
written -1 among drafts. A gap within the rounding of the proposal's dtype does not count as lacking
mass: without replacement, once the likely tokens are drawn, it would be all of the remaining mass.
Everything is computed in float64.
"""

from dataclasses import dataclass
from itertools import product

import torch

# allowed error of sums; in a dtype with fewer digits, the rounding error of its entries
TOLERANCE = 1e-3
# most tuples of drafts that `Scheme.acceptance` enumerates
MAX_TUPLES = 1 << 20


@dataclass(slots=True)
class Noise:
    """Independent uniform numbers in (0, 1); each field comes from a stream of its own."""

    select: torch.Tensor  # [B], which draft is the candidate
    accept: torch.Tensor  # [B, K], whether a draft is taken
    residual: torch.Tensor  # [B], the token when none is


@dataclass(slots=True)
class DraftDecision:
    token: torch.Tensor  # [B] int64, of distribution q
    draft: torch.Tensor  # [B] int64, which draft was taken, -1 for none


@dataclass(slots=True)
class Outcome:
    """Distribution of a scheme's output, given the drafts."""

    accept: torch.Tensor  # [B, K] float64, probability that draft k is the output
    residual: torch.Tensor  # [B, V] float64, distribution of the output when no draft is

    def probs(self, drafts: torch.Tensor) -> torch.Tensor:
        """[B, V]: distribution of the output given the drafts [B, K]."""
        probs = (1 - self.accept.sum(-1, keepdim=True)).clamp(min=0) * self.residual
        # a null draft is never accepted: its zero may go anywhere
        return probs.scatter_add(1, drafts.long().clamp(min=0), self.accept)


@dataclass(slots=True)
class SchemePlan:
    """Steps to the output, given the drafts. A = V + 1 atoms, the last one null."""

    select: torch.Tensor | None  # [B, K], distribution of the candidate; None tries all in order
    accept: torch.Tensor  # [B, K], probability of taking a draft that is tried
    residual: torch.Tensor  # [B, A], distribution of the output when none is taken


class Scheme:
    """Base of the schemes, which define `_plan`, and `_acceptance` if it has a closed form."""

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def same_proposals(self) -> bool:
        """True if every draft must have the same proposal."""
        return False

    def outcome(
        self, drafts: torch.Tensor, target: torch.Tensor, proposal: torch.Tensor
    ) -> Outcome:
        """Return the distribution of the output given the drafts.

        drafts: [B, K] integers, -1 is a null draw. target: [B, V] probabilities. proposal: [B, V]
        if all drafts have the same one, else [B, K, V]. The sum of a target may be off by 1e-3, in
        16 bits by 4 eps. A proposal may lack mass; a gap within rounding does not count, which is
        4 V eps of its dtype, but at most 1e-3 and at least 4 eps.

        Raises ValueError for shapes, negative or non-finite entries and sums that do not fit.
        """
        plan = self._plan(*self._prepare(drafts, target, proposal))
        accept = plan.accept
        if plan.select is not None:
            accept = accept * plan.select
        else:
            reject = (1 - accept).cumprod(-1)
            accept = torch.cat([accept[:, :1], accept[:, 1:] * reject[:, :-1]], 1)
        return Outcome(accept, plan.residual[:, :-1])

    def decide(
        self, drafts: torch.Tensor, target: torch.Tensor, proposal: torch.Tensor, noise: Noise
    ) -> DraftDecision:
        """Draw the output; arguments as in `outcome`."""
        x, q, p = self._prepare(drafts, target, proposal)
        return self._decide(x, q, p, noise)

    def acceptance(self, target: torch.Tensor, proposal: torch.Tensor, k: int) -> torch.Tensor:
        """[B] float64: probability that one of k drafts is taken, over drafts and noise."""
        q, p = prepare_distributions(target, proposal, k)
        self._check_same(p)
        return self._acceptance(q, p)

    def _plan(self, x: torch.Tensor, q: torch.Tensor, p: torch.Tensor) -> SchemePlan:
        """Plan for drafts x [B, K] in 0 .. V, with q [B, A] and p [B, K, A], which sum to 1."""
        raise NotImplementedError

    def _decide(
        self, x: torch.Tensor, q: torch.Tensor, p: torch.Tensor, noise: Noise
    ) -> DraftDecision:
        plan = self._plan(x, q, p)
        if plan.select is None:
            taken = noise.accept < plan.accept
            draft = taken.int().argmax(-1)
            taken = taken.any(-1)
        else:
            draft = inverse_cdf(plan.select, noise.select)
            taken = noise.accept[:, 0] < plan.accept.gather(1, draft[:, None])[:, 0]
        token = torch.where(
            taken, x.gather(1, draft[:, None])[:, 0], inverse_cdf(plan.residual, noise.residual)
        )
        return DraftDecision(token, torch.where(taken, draft, -1))

    def _acceptance(self, q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Acceptance [B], by enumeration of all tuples of drafts."""
        B, K, A = p.shape
        if A**K > MAX_TUPLES:
            raise ValueError(
                f"k must leave at most {MAX_TUPLES} tuples of drafts to enumerate, got {A} ** {K}"
            )
        total = torch.zeros(B, dtype=q.dtype, device=q.device)
        for drafts in product(range(A), repeat=K):
            x = torch.tensor(drafts, device=q.device).expand(B, K)
            plan = self._plan(x, q, p)
            chance = self.draft_probs(x, p)
            total += chance * (1 - (1 - plan.accept).prod(-1))
        return total

    def draft_probs(self, x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """[B]: probability of the drafts x [B, K] under p [B, K, A]."""
        return p.gather(2, x[:, :, None])[:, :, 0].prod(-1)

    def _prepare(
        self, drafts: torch.Tensor, target: torch.Tensor, proposal: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Check the drafts, as int64 with V for null draws, and the distributions."""
        if target.ndim != 2:
            raise ValueError(f"target must have shape [B, V], got {tuple(target.shape)}")
        B, V = target.shape
        if drafts.ndim != 2 or drafts.shape[0] != B or drafts.shape[1] < 1:
            raise ValueError(f"drafts must have shape ({B}, K), got {tuple(drafts.shape)}")
        if drafts.is_floating_point() or drafts.dtype == torch.bool:
            raise ValueError(f"drafts must be integers, got {drafts.dtype}")
        if drafts.numel() and not -1 <= int(drafts.min()) <= int(drafts.max()) < V:
            raise ValueError(
                f"drafts must lie in -1 .. {V - 1}, got {int(drafts.min())} .. {int(drafts.max())}"
            )
        x = drafts.long()
        q, p = prepare_distributions(target, proposal, x.shape[1])
        self._check_same(p)
        return torch.where(x < 0, V, x), q, p

    def _check_same(self, p: torch.Tensor) -> None:
        if self.same_proposals and not bool((p == p[:, :1]).all()):
            raise ValueError(f"proposal must be the same for every draft under {self.name!r}")


def prepare_distributions(
    target: torch.Tensor, proposal: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, A] and p [B, K, A] in float64 with the null atom, checked and normalised to sum 1."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k must be a whole number of at least 1, got {k!r}")
    if target.ndim != 2 or not target.shape[1]:
        raise ValueError(f"target must have shape [B, V], got {tuple(target.shape)}")
    B, V = target.shape
    if tuple(proposal.shape) not in ((B, V), (B, k, V)):
        raise ValueError(
            f"proposal must have shape {(B, V)} or {(B, k, V)}, got {tuple(proposal.shape)}"
        )
    q, p = target.double(), proposal.double()
    for name, probs in (("target", q), ("proposal", p)):
        right = (probs >= 0) & probs.isfinite()
        if not bool(right.all()):
            bad = float(probs[~right][0])
            raise ValueError(f"{name} must be finite and not negative, got {bad}")
    total = q.sum(-1, keepdim=True)
    far_off = max(TOLERANCE, 4 * _eps(target))
    if bool(((total - 1).abs() > far_off).any()):
        far = float(total.flatten()[(total - 1).abs().argmax()])
        raise ValueError(f"target must sum to 1 within {far_off}, got {far}")
    mass = p.sum(-1, keepdim=True)
    far_off = max(TOLERANCE, 4 * _eps(proposal))
    if bool((mass > 1 + far_off).any()):
        raise ValueError(f"proposal must sum to at most 1 + {far_off}, got {float(mass.max())}")
    q = torch.nn.functional.pad(q / total, (0, 1))
    full = mass >= 1 - _rounding(proposal)
    p = torch.cat([torch.where(full, p / mass, p), torch.where(full, 0, 1 - mass)], -1)
    return q, p if p.ndim == 3 else p[:, None].expand(B, k, V + 1)


def _eps(probs: torch.Tensor) -> float:
    return torch.finfo(probs.dtype).eps if probs.is_floating_point() else 0.0


def _rounding(probs: torch.Tensor) -> float:
    """Rounding error of the sum of a complete distribution [.., V], by its dtype.

    Each entry has a relative error of eps / 2, and so has their sum. If they were divided by a sum
    that was accumulated in that dtype, its error is V eps / 2 at worst.
    """
    eps = _eps(probs)
    return max(4 * eps, min(4 * probs.shape[-1] * eps, TOLERANCE))


def ratio(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """min(1, a / b); 0 where b is 0, since a token that cannot be drawn is never tried."""
    return torch.where(b > 0, (a / b.clamp(min=torch.finfo(b.dtype).tiny)).clamp(max=1), 0)


def normalised(mass: torch.Tensor, fallback: torch.Tensor) -> torch.Tensor:
    """mass / sum over the last dimension; `fallback` where the sum is 0, which is never drawn."""
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / total.clamp(min=torch.finfo(mass.dtype).tiny), fallback)


def inverse_cdf(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """[B]: the atom of probs [B, A] (of any sum) at u [B]; never one of probability 0."""
    cdf = probs.cumsum(-1)
    atom = (cdf <= u.to(probs.dtype)[:, None] * cdf[:, -1:]).sum(-1)
    places = torch.arange(probs.shape[1], device=probs.device)
    return atom.minimum(torch.where(probs > 0, places, 0).amax(-1))
