"""The canonical decomposition: choose one of the drafts, then single-draft speculative sampling.

Step 1 chooses Y among the drafts; p_I is the distribution of Y over drafts and choice. Step 2
accepts Y with probability min(1, q(Y) / p_I(Y)), else draws from norm((q - p_I)^+). So

    acceptance = sum over y of min(q(y), p_I(y))

and the output is distributed as q for any weights of the choice, as p_I is computed from them.

**Two drafts.** Tokens are ranked by q - p_1 p_2, largest first. Omega_0 are the first `alphabet`
tokens, Omega_1 the first `tokens` of them. For two drafts in Omega_1 the weights come from the
linear program that maximises the acceptance; otherwise the token of smaller rank wins; of two
drafts outside Omega_0 the first wins unless it is null. With `alphabet` and `tokens` at None
nothing is truncated, and the acceptance is the largest possible. Truncation loses at most

    sum over x outside Omega_1 of (q(x) - p_1(x) p_2(x))^+

**More drafts** play a tournament: the winner so far, distributed as p_I, meets the next draft.
Truncated rounds may lower the acceptance; a round that would do so is skipped for all drafts.

**The linear program** (`split_pairs`) splits the mass of pairs between their members. Each pair
{i, j} of s items has mass m_ij = m_ji to be split, f_ij to i and f_ji = m_ij - f_ij to j. With
base_i the mass that item i already has, the program is

    max  sum over i of min( limit_i, base_i + sum over j of f_ij ),    0 <= f_ij <= m_ij

a maximum flow from pairs to items. Moving mass of {i, j} from i to j is an arc of capacity f_ij, so
it is a flow over the items alone, from those above their limit to those below. It is solved by
push-relabel, all items of all rows at once: an item above its limit pushes along every arc that
goes one label down, and one that has no such arc is relabelled. Mass that reaches no item below
its limit stays.

Khisti et al., "Multi-draft speculative sampling: canonical decomposition and theoretical limits",
2410.18234.
"""

from dataclasses import dataclass

import torch

from csd.research.verify.scheme import Scheme, SchemePlan, normalised, ratio

# zero, relative to masses of order 1
EPS = 1e-15


def split_pairs(base: torch.Tensor, mass: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Optimal split f [B, s, s].

    base, limit: [B, s] float64, not negative. mass: [B, s, s] float64, symmetric, 0 on the
    diagonal. The start gives each pair to its smaller index.
    """
    s = base.shape[1]
    flow = mass.triu()
    excess = base + flow.sum(-1) - limit
    label = torch.zeros(base.shape, dtype=torch.int64, device=base.device)
    while True:
        active = (excess > EPS) & (label < s)
        if not bool(active.any()):
            return flow
        arc = flow > EPS
        down = arc & (label[:, :, None] == label[:, None, :] + 1)
        capacity = torch.where(down & active[:, :, None], flow, 0)
        # each item fills its arcs in order until its excess is spent
        before = capacity.cumsum(-1) - capacity
        push = torch.minimum((excess[:, :, None] - before).clamp(min=0), capacity)
        flow = flow - push + push.mT
        excess = excess - push.sum(-1) + push.sum(-2)
        stuck = active & ~down.any(-1)
        lowest = torch.where(arc, label[:, None, :], s).amin(-1) + 1
        label = torch.where(stuck, lowest.clamp(max=s), label)


# the program has tokens^2 variables
MAX_TOKENS = 256


@dataclass(slots=True)
class Choice:
    """Weights of one round for every pair of tokens."""

    probs: torch.Tensor  # [B, A], distribution of the winner
    rank: torch.Tensor  # [B, A], index in Omega_0; the size of Omega_0 for tokens outside
    weight: torch.Tensor  # [B, s, s], probability that rank i wins against rank j
    skip: torch.Tensor | None = None  # [B] bool, where the holder stays against any rival

    def wins(self, holder: torch.Tensor, rival: torch.Tensor) -> torch.Tensor:
        """Probability [B] that the holder [B] stays, against the rival [B]."""
        s = self.weight.shape[1]
        i, j = (self.rank.gather(1, x[:, None])[:, 0] for x in (holder, rival))
        row = torch.arange(i.shape[0], device=i.device)
        inside = self.weight[row, i.clamp(max=s - 1), j.clamp(max=s - 1)]
        null = self.rank.shape[1] - 1
        by_rank = torch.where(i == j, (holder != null) | (rival == null), i < j)
        decided = torch.where((i < s) & (j < s), inside, by_rank.to(inside.dtype))
        stays = holder == rival
        if self.skip is not None:
            stays = stays | self.skip
        return torch.where(stays, 1, decided)


@dataclass(frozen=True)
class Canonical(Scheme):
    """tokens: size of Omega_1, None for all of Omega_0; alphabet: size of Omega_0, None for all."""

    tokens: int | None = 5
    alphabet: int | None = 40

    name = "canonical"

    def __post_init__(self) -> None:
        for field in ("tokens", "alphabet"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} must be at least 1 or None, got {value}")

    def choose(self, q: torch.Tensor, p1: torch.Tensor, p2: torch.Tensor) -> Choice:
        """The weights of a round; q, p1, p2: [B, A], the last atom null."""
        A = q.shape[1]
        n = min(self.alphabet or A, A)
        s = min(self.tokens or n, n)
        if s > MAX_TOKENS:
            raise ValueError(
                f"tokens must be at most {MAX_TOKENS}, got {s}: set a smaller alphabet"
            )
        score = torch.where(p1 + p2 > 0, q - p1 * p2, -torch.inf)
        # null ranks after every token that can be drafted
        score[:, -1] = torch.where(p1[:, -1] + p2[:, -1] > 0, -2.0, -torch.inf)
        top = score.topk(n, sorted=True).indices
        rank = top.new_full(q.shape, n)
        rank.scatter_(1, top, torch.arange(n, device=q.device).expand_as(top))
        a, b, limit = p1.gather(1, top), p2.gather(1, top), q.gather(1, top)
        far1, far2 = (torch.where(rank == n, p, 0) for p in (p1, p2))
        out1, out2 = far1.sum(-1, keepdim=True), far2.sum(-1, keepdim=True)
        # mass of all larger ranks
        after1, after2 = (
            x.flip(1).cumsum(1).flip(1) - x + out for x, out in ((a, out1), (b, out2))
        )
        won = a * b + a * after2 + after1 * b

        # inside Omega_1, only pairs with larger ranks beyond it are settled
        x, y = a[:, :s], b[:, :s]
        mass = x[:, :, None] * y[:, None, :]
        mass = (mass + mass.mT) * (1 - torch.eye(s, dtype=q.dtype, device=q.device))
        beyond1, beyond2 = (v[:, s - 1 : s] for v in (after1, after2))
        base = x * y + x * beyond2 + beyond1 * y
        flow = split_pairs(base, mass, limit[:, :s])
        won[:, :s] = base + flow.sum(-1)
        weight = torch.where(mass > 0, flow / mass.clamp(min=1e-300), 0.5)

        # outside: the first draft, or the second when the first is null
        null1, null2 = far1[:, -1:], far2[:, -1:]
        probs = far1 * out2 + null1 * far2
        probs[:, -1:] = null1 * null2
        return Choice(probs.scatter(1, top, won), rank, weight.clamp(0, 1))

    def _rounds(self, q: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, list[Choice]]:
        probs, choices = p[:, 0], []
        for k in range(1, p.shape[1]):
            choice = self.choose(q, probs, p[:, k])
            before, after = (torch.minimum(q, x).sum(-1) for x in (probs, choice.probs))
            choice.skip = after < before
            choices.append(choice)
            probs = torch.where(choice.skip[:, None], probs, choice.probs)
        return probs, choices

    def _plan(self, x: torch.Tensor, q: torch.Tensor, p: torch.Tensor) -> SchemePlan:
        probs, choices = self._rounds(q, p)
        # distribution of the current winner, given the drafts
        holds = torch.zeros(x.shape, dtype=q.dtype, device=q.device)
        holds[:, 0] = 1
        for k, choice in enumerate(choices, 1):
            stays = torch.stack([choice.wins(x[:, h], x[:, k]) for h in range(k)], 1)
            before = holds[:, :k]
            holds[:, k] = (before * (1 - stays)).sum(-1)
            holds[:, :k] = before * stays
        accept = ratio(q.gather(1, x), probs.gather(1, x))
        return SchemePlan(holds, accept, normalised((q - probs).clamp(min=0), q))

    def _acceptance(self, q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return torch.minimum(q, self._rounds(q, p)[0]).sum(-1)
