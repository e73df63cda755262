"""Proposal and verification of a step with a multi-draft scheme (`csd/engine/step/step.py`).

At every node on the path of a drawn tree a scheme turns the drafts into a token. From each root: if
a node was expanded, the scheme decides among its K draws, with random words of the slot in separate
streams,

    word(key, index, position, sample, stream | step << 3)

    SELECT    index = rank              the candidate
    ACCEPT    index = rank K + k        whether draft k is taken
    RESIDUAL  index = 2 rank, + 1       the token when none is, in two stages

An accepted draft leads to its child; anything else ends the step. A node that was not expanded
samples the target directly. Every token on the path is distributed as the target, whatever the
drafts.

A node's proposal is over the few successors of its context, or over a draft model's likeliest
tokens. The scheme gets these and one atom for all other tokens, which are never drafted. This is
exact, and its cost does not depend on the vocabulary. Nodes may have different numbers of drafts,
each from its own distribution if the scheme allows it.
"""

from typing import Any

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from csd.kernels.common.noise import ACCEPT, RESIDUAL, SELECT, philox_words_ref, stepped, uniform
from csd.kernels.ops import Ops
from csd.kernels.verify.reference_rows import row_scores
from csd.research.draft_models.drafter import ModelDrafter
from csd.research.verify import make_scheme
from csd.research.verify.sampled_tree import Drawn, Node, SampledTrees
from csd.research.verify.scheme import Noise, Scheme, inverse_cdf
from csd.research.verify.sequences import Sequences
from csd.state.pool import MAX_DEPTH, Pool
from csd.state.slots import Slots
from csd.state.verdict import LENGTH, RUNNING, STOP, Verdict


def processed(logits: torch.Tensor, rows: torch.Tensor, pool: Pool, slots: Slots) -> torch.Tensor:
    """Probabilities [n, V] at `rows` [n] of the pool; greedy rows are not filtered.

    logits: [M, V]; 16-bit logits are processed in float32, float64 stays float64.
    """
    z, heads, rest = row_scores(logits[rows], rows, pool, slots)
    # the last column takes the padding of heads
    allowed = torch.cat([rest > 0, torch.zeros_like(rest[:, :1], dtype=torch.bool)], dim=1)
    allowed = allowed.scatter_(1, heads.token, heads.score > -torch.inf)[:, :-1]
    return torch.where(allowed, z, -torch.inf).softmax(-1)


def descend(
    scheme: Scheme,
    draws: int,
    logits: torch.Tensor,
    pool: Pool,
    drawn: Drawn,
    slots: Slots,
    verdict: Verdict,
) -> Verdict:
    """Write the samples, paths and ends of `scheme` to `verdict`; returns it. logits: [M, V]."""
    broken = (pool.slot >= 0) & ~logits.amax(-1).isfinite()
    verdict.bad.index_fill_(0, pool.slot[broken].long(), True)
    bad = verdict.bad.tolist()
    row = {s: start for s, start in enumerate(drawn.start) if pool.slot_nodes[s] > 0 and not bad[s]}
    paths: dict[int, list[int]] = {s: [] for s in row}
    stops = slots.stop_ids.tolist()
    left = (slots.max_new - slots.generated).tolist()
    finish = torch.full_like(verdict.finish, RUNNING)
    while row:
        rows = torch.tensor(list(row.values()))
        nodes = [drawn.nodes[r] for r in row.values()]
        probs = processed(logits, rows, pool, slots).double()
        token = _decide(scheme, draws, probs, nodes, slots)
        chosen = token[:, None]
        raw = logits[rows].to(probs.dtype).log_softmax(-1)
        verdict.sample[rows] = token.to(verdict.sample.dtype)
        verdict.logprob[rows] = probs.gather(1, chosen)[:, 0].log().to(verdict.logprob.dtype)
        verdict.raw_logprob[rows] = raw.gather(1, chosen)[:, 0].to(verdict.raw_logprob.dtype)
        below = {}
        for (s, r), node, t in zip(row.items(), nodes, token.tolist(), strict=True):
            paths[s].append(r)
            if t in stops[s]:
                finish[s] = STOP
            elif len(paths[s]) >= left[s]:
                finish[s] = LENGTH
            else:
                # equal draws are one prefix, represented by the first
                same = [c for c in node.children if drawn.nodes[drawn.start[s] + c].token == t]
                if same:
                    below[s] = drawn.start[s] + same[0]
        row = below
    accept_row = torch.full_like(verdict.accept_row, -1)
    count = torch.zeros_like(verdict.accept_count)
    for s, path in paths.items():
        path = path[: MAX_DEPTH + 1]
        accept_row[s, : len(path)] = torch.tensor(path, dtype=accept_row.dtype)
        count[s] = len(path)
    verdict.accept_row, verdict.accept_count, verdict.finish = accept_row, count, finish
    return verdict


def _decide(
    scheme: Scheme, draws: int, probs: torch.Tensor, nodes: list[Node], slots: Slots
) -> torch.Tensor:
    """Tokens [n] of the nodes; probs: [n, V], their target distributions."""
    s = torch.tensor([n.slot for n in nodes])
    depth = torch.tensor([n.depth for n in nodes])
    key, sample, step = slots.key[s], slots.sample[s], slots.step[s].long()
    position = slots.generated[s] + depth

    def words(stream: int, index: list) -> torch.Tensor:
        """Uniform float64 numbers in the shape of `index`, [n] or [n, K]."""
        row = torch.tensor(index)
        shape = -1, *[1] * (row.ndim - 1)
        counter = (x.view(shape) for x in (position, sample, stepped(stream, step)))
        return uniform(philox_words_ref(key.view(shape), row, *counter), torch.float64)

    # [n, W + 1]: the kept successors, then all other tokens as one atom; padding points to an extra
    # index after the vocabulary
    tokens = [torch.tensor(n.successors.token if n.children else (), dtype=s.dtype) for n in nodes]
    column = pad_sequence(tokens, batch_first=True, padding_value=probs.shape[1])
    width = column.shape[1]
    wide = pad(probs, (0, 1))
    mass = wide.gather(1, column)
    other = wide.scatter(1, column, 0)[:, :-1]
    token = inverse_cdf(other, words(RESIDUAL, [2 * n.rank + 1 for n in nodes]))
    target = torch.cat([mass, other.sum(-1, keepdim=True)], 1)
    select = words(SELECT, [n.rank for n in nodes])
    accept = words(ACCEPT, [[n.rank * draws + k for k in range(draws)] for n in nodes])
    residual = words(RESIDUAL, [2 * n.rank for n in nodes])
    # batch nodes with equal numbers of drafts, from one common distribution or one per draft
    alike: dict[tuple[int, int], list[int]] = {}
    for i, node in enumerate(nodes):
        if node.children:
            alike.setdefault((len(node.drafts), node.successors.probs.ndim), []).append(i)
    for (count, _), members in alike.items():
        members_index = torch.tensor(members)
        drafts = torch.tensor([nodes[i].drafts for i in members])
        noise = Noise(select[members_index], accept[members_index, :count], residual[members_index])
        # without mass on all other tokens
        each = [torch.from_numpy(nodes[i].successors.probs) for i in members]
        proposal = torch.stack([pad(x, (0, width + 1 - x.shape[-1])) for x in each])
        drawn = scheme.decide(drafts, target[members_index], proposal, noise).token
        inside = drawn < width
        drafted = column[members_index].gather(1, drawn.clamp(max=width - 1)[:, None])[:, 0]
        token[members_index] = torch.where(inside, drafted, token[members_index])
    return token


# verifier -> number of drafts per node
DRAWS = {"canonical": 2, "recursive": 2, "kseq": 2, "single": 1}


class MultiDraftVerifier:
    """Draft trees of random draws, and their verification by one scheme.

    name: one of DRAWS. drafter: the proposal, a consensus graph or a draft model alone.
    """

    verifies_any_pool = False

    def __init__(self, name: str, drafter: Any, ops: Ops):
        self.scheme, self._ops = make_scheme(name), ops
        if isinstance(drafter, ModelDrafter):
            self._check_model(name, drafter)
            device, self.draws = drafter.device, 1 if name == "single" else drafter.k
            self._trees: Any = Sequences(drafter, self.draws)
        elif hasattr(drafter, "table"):
            device, self.draws = drafter.table.step.device, DRAWS[name]
            self._trees = SampledTrees(drafter, ops.draft_tree, self.draws)
        else:
            raise ValueError(
                f"verifier {name!r} draws from a known proposal: drafter must be 'consensus' or a "
                f"csd.DraftModel, got {type(drafter).__name__}"
            )
        if device.type != "cpu":
            raise NotImplementedError(
                f"verifier {name!r} runs on CPU only; on {device} use 'match'"
            )
        self._drawn = Drawn([], [])

    def _check_model(self, name: str, drafter: ModelDrafter) -> None:
        if drafter.graph is not None:
            raise ValueError(
                f"verifier {name!r} draws from one proposal: graph must be False in {drafter.name}"
            )
        several = isinstance(drafter.temperature, tuple)
        if several and self.scheme.same_proposals:
            raise ValueError(
                f"verifier {name!r} needs drafts of one distribution: temperature must be one "
                f"number in {drafter.name}, got {drafter.temperature}"
            )

    def propose(self, slots: Slots, live_count: int, nodes: int, budget: Any) -> Pool:
        """Draw the step's pool, with at most `nodes` drafts.

        The proposals are stored for `verify`.
        """

        def choose(costs: list[int]) -> int:
            return budget.select(live_count, costs)

        pool, self._drawn = self._trees.grow(slots, live_count, nodes, choose)
        if nodes:
            budget.record_selection(len(self._drawn.nodes) - live_count)
        return pool

    def verify(self, logits: torch.Tensor, pool: Pool, slots: Slots) -> Verdict:
        """Verify the step's pool: top 8 of every row, and the scheme's tokens on the paths."""
        verdict = self._ops.verify_all(logits, pool, slots)
        return descend(self.scheme, self.draws, logits, pool, self._drawn, slots, verdict)
