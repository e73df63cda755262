"""Multi-draft verification: turn K drafts of a token into one token distributed as the target.

    match       sample the target and compare the token with the drafts (the default)
    canonical   choose one draft by the linear program's weights, then accept or resample
    recursive   try the drafts in order against the previous ones' residual (SpecInfer)
    kseq        try the drafts in order with one scale (SpecTr)
    single      speculative sampling with the first draft only

All have one interface: `outcome`, the exact distribution given the drafts; `decide`, a draw from
it; `acceptance`, the probability that a draft is taken. `optimal_acceptance` bounds them all.
Tensors: drafts [B, K], target [B, V], proposal [B, V] or [B, K, V].

All but `match` need drafts *drawn* from a known proposal, with noise of their own.
"""

from csd.research.verify.bound import can_always_accept, joint_acceptance, optimal_acceptance
from csd.research.verify.canonical import Canonical
from csd.research.verify.match import Match, coupled_drafts, fixed_drafts
from csd.research.verify.recursive import KSeq, Recursive, Single
from csd.research.verify.scheme import DraftDecision, Noise, Outcome, Scheme

__all__ = [
    "SCHEMES",
    "Canonical",
    "DraftDecision",
    "KSeq",
    "Match",
    "Noise",
    "Outcome",
    "Recursive",
    "Scheme",
    "Single",
    "can_always_accept",
    "coupled_drafts",
    "fixed_drafts",
    "joint_acceptance",
    "make_scheme",
    "optimal_acceptance",
]

SCHEMES = {scheme.name: scheme for scheme in (Match(), Canonical(), Recursive(), KSeq(), Single())}


def make_scheme(name: str) -> Scheme:
    """A scheme by name, with its default settings."""
    if name not in SCHEMES:
        raise ValueError(f"name must be one of {', '.join(map(repr, SCHEMES))}, got {name!r}")
    return SCHEMES[name]
