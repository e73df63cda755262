"""Upper bound on the acceptance of any scheme, and the condition for 1.

For K independent drafts of distribution p and target q,

    P* = 1 + min over sets S of ( q(S) - p(S)^K )

For any joint distribution of the drafts, p(S)^K becomes the probability that all drafts lie in S.
With independent drafts a minimising S is a prefix of the tokens sorted by q / p ascending, so a
sort and two sums are enough: O(V log V). P* = 1 if and only if q(S) >= p(S)^K for every S. Drafts
drawn without replacement, or jointly, are bounded by enumeration of all sets.

Khisti et al., 2410.18234, for K = 2; the form for any K is the dual in Hu et al., "Towards optimal
multi-draft speculative decoding", 2502.18779.
"""

import torch

from csd.research.verify.scheme import prepare_distributions

# largest vocabulary for the enumeration of all sets
MAX_JOINT = 16


def optimal_acceptance(
    target: torch.Tensor, proposal: torch.Tensor, k: int, replacement: bool = True
) -> torch.Tensor:
    """[B] float64: the bound for k drafts of proposal [B, V] and target [B, V].

    replacement: whether drafts are independent; if not, each comes from the proposal without the
    earlier ones, renormalised, and V is at most 16. Raises ValueError as `Scheme.outcome`.
    """
    worst = _worst_set if replacement else _worst_set_of_distinct
    return (1 + worst(target, proposal, k)).clamp(0, 1)


def can_always_accept(target: torch.Tensor, proposal: torch.Tensor, k: int) -> torch.Tensor:
    """[B] bool: True if the bound is 1, that is, q(S) >= p(S)^k for all S, up to rounding."""
    rounding = 4 * target.shape[1] * torch.finfo(torch.float64).eps
    return _worst_set(target, proposal, k) >= -rounding


def _distributions(
    target: torch.Tensor, proposal: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target and the common proposal of all drafts, both [B, V + 1] with the null atom."""
    if proposal.ndim != 2:
        raise ValueError(f"proposal must have shape [B, V], got {tuple(proposal.shape)}")
    q, p = prepare_distributions(target, proposal, k)
    return q, p[:, 0]


def _worst_set(target: torch.Tensor, proposal: torch.Tensor, k: int) -> torch.Tensor:
    q, p = _distributions(target, proposal, k)
    # tokens that are never drafted come last, where they can only add to q(S)
    order = torch.where(p > 0, q / p.clamp(min=1e-300), torch.inf).argsort(-1)
    mass_q, mass_p = (x.gather(1, order).cumsum(-1) for x in (q, p))
    return (mass_q - mass_p.clamp(max=1) ** k).amin(-1).clamp(max=0)


def _worst_set_of_distinct(target: torch.Tensor, proposal: torch.Tensor, k: int) -> torch.Tensor:
    q, p = _distributions(target, proposal, k)
    V = target.shape[1]
    if V > MAX_JOINT:
        raise ValueError(f"target must have at most {MAX_JOINT} tokens, got {V}")
    inside = drawn_inside(p, k)
    mass = q @ _members(V + 1, q.device).double().mT
    # null lies in every set, and is the last bit
    return (mass - inside)[:, 1 << V :].amin(-1).clamp(max=0)


def drawn_inside(p: torch.Tensor, k: int) -> torch.Tensor:
    """[B, 2^A]: probability that k draws without replacement from p [B, A] lie in a set.

    Bit i of a set's index is atom i. Once p has no mass left, nothing more is drawn.
    """
    B, A = p.shape
    # mass of p outside each set
    rest = p @ (~_members(A, p.device)).double().mT
    chance = torch.zeros_like(rest)
    chance[:, 0] = 1
    for _ in range(k):
        each = torch.where(rest > 0, chance / rest.clamp(min=1e-300), 0)
        chance = torch.where(rest > 0, 0, chance)
        for i in range(A):
            without, with_it = each.view(B, -1, 2, 1 << i), chance.view(B, -1, 2, 1 << i)
            with_it[:, :, 1] += without[:, :, 0] * p[:, i, None, None]
    # from the probability that the draws are a set to the one that they lie in it
    for i in range(A):
        pair = chance.view(B, -1, 2, 1 << i)
        pair[:, :, 1] += pair[:, :, 0]
    return chance


def _members(n: int, device: torch.device) -> torch.Tensor:
    """[2^n, n] bool: membership of n atoms in each set."""
    sets = torch.arange(1 << n, device=device)
    return ((sets[:, None] >> torch.arange(n, device=device)) & 1).bool()


def joint_acceptance(
    target: torch.Tensor, drafts: torch.Tensor, chance: torch.Tensor
) -> torch.Tensor:
    """Bound for drafts of any joint distribution, by enumeration of all sets: a scalar.

    target: [V], V <= 16. drafts: [N, K] tuples of tokens, -1 is null. chance: [N], their
    probabilities.
    """
    V = target.shape[0]
    if V > MAX_JOINT:
        raise ValueError(f"target must have at most {MAX_JOINT} tokens, got {V}")
    member = _members(V, target.device)
    # a null draw lies in every set: it never helps
    member = torch.cat([member, torch.ones_like(member[:, :1])], 1)
    x = torch.where(drafts < 0, V, drafts.long())
    inside = member[:, x].all(-1).double() @ chance.double()
    mass = member[:, :-1].double() @ target.double()
    return (1 + (mass - inside).amin()).clamp(0, 1)
