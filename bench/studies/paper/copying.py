"""Control: a verifier that accepts a sibling's token with probability min(1, q / q_sibling).

This is speculative sampling that treats the sibling's text as a draw from a draft model. Each
sample keeps its distribution, but the samples of a prompt become copies of each other. csd never
does this; the study does, to show that its measures of diversity detect it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from csd.graph.baselines.host_drafter import HostDrafter
from csd.graph.host_tree import Tree
from csd.kernels.common.noise import ACCEPT, RESIDUAL, philox_words_ref, uniform
from csd.kernels.verify.reference import descend_ref
from csd.state.pool import SIBLING
from csd.verify.multi_draft import processed
from csd.verify.scheme import inverse_cdf

K = 8


@dataclass(slots=True)
class Group:
    """Tokens of one prompt's samples, and the prompt's last tokens before them."""

    before: list[int]
    tokens: dict[int, list[int]] = field(default_factory=dict)  # by sample
    # by sample, the target's distribution at each token
    distributions: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    drafted: dict[int, tuple[int, int]] = field(default_factory=dict)  # (sibling, place) in a step


class SiblingChain(HostDrafter):
    """Drafts the continuation of the last K or fewer tokens in a sibling, the first match."""

    def open(self, prompt):
        self.group = Group(prompt[-K:])
        return self.group

    def extend(self, group, sample, tokens, probabilities):
        group.tokens.setdefault(sample, []).extend(tokens)

    def draft(self, group, sample, tree: Tree):
        group.drafted.pop(sample, None)
        n = len(group.before)
        own = group.before + group.tokens.get(sample, [])
        for k in range(min(K, len(own)), 0, -1):
            for sibling, tokens in group.tokens.items():
                text = group.before + tokens
                for end in range(n, len(text)):
                    if sibling != sample and text[end - k : end] == own[-k:] and end >= k:
                        group.drafted[sample] = sibling, end - n
                        tree.chain(text[end : end + tree.nodes], SIBLING)
                        return


class Copying:
    """A step's `verify` for the drafts of a SiblingChain, one prompt at a time."""

    def __init__(self, verify, drafter: list[SiblingChain]):
        self._verify, self._drafter = verify, drafter

    def __call__(self, logits, pool, slots):
        verdict = self._verify(logits, pool, slots)
        group = self._drafter[-1].group
        distributions = processed(logits, torch.arange(pool.rows), pool, slots).double()
        for s in slots.live.nonzero()[:, 0].tolist():
            first, count = int(pool.slot_start[s]), int(pool.slot_nodes[s])
            # the rows of a chain are consecutive; the last has no child
            for row in range(first, first + count - 1):
                draft = int(pool.token[row + 1])
                sibling, start = group.drafted[int(slots.sample[s])]
                probs = group.distributions[sibling][start + row - first]
                token = self._decide(distributions[row], probs, draft, slots, s, row - first)
                verdict.sample[row] = token
                if token != draft:
                    break
        path = descend_ref(verdict.sample, pool, slots)
        verdict.accept_row, verdict.accept_count, verdict.finish = path
        for s, rows in enumerate(verdict.accept_row.tolist()):
            accepted = rows[: int(verdict.accept_count[s])]
            own = group.distributions.setdefault(int(slots.sample[s]), [])
            own.extend(distributions[row] for row in accepted)
        return verdict

    def _decide(self, q, q_sibling, draft: int, slots, s: int, depth: int) -> int:
        """Returns the draft with probability min(1, q / q_sibling), else draws (q - q_sibling)+."""
        where = (slots.key[s], torch.tensor(0), slots.generated[s] + depth, slots.sample[s])
        accept, residual = (
            uniform(philox_words_ref(*where, stream), torch.float64)
            for stream in (ACCEPT, RESIDUAL)
        )
        if accept < q[draft] / q_sibling[draft]:
            return draft
        return int(inverse_cdf((q - q_sibling).clamp(min=0)[None], residual[None])[0])


@contextmanager
def copying(engine) -> Iterator:
    """Within the block, `engine` copies siblings; yields the value of its option `drafter`."""
    made: list[SiblingChain] = []

    def make(ops, device):
        made.append(SiblingChain())
        return made[-1]

    before = engine.ops
    copying = Copying(before.verify_all, made)
    engine.ops = replace(before, verify=copying, verify_all=copying)
    try:
        yield make
    finally:
        engine.ops = before
