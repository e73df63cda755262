"""What the host learns of a step, copied off the device as one small bundle."""

from dataclasses import dataclass

import torch

from csd.drafts import Trees
from csd.pool import Pool
from csd.slots import Slots
from csd.verdict import Verdict


@dataclass(slots=True)
class Record:
    """Lists over the S slots; a slot without rows in the step has count 0."""

    owners: list  # csd.job.Running or None: who held each slot when the step ran
    count: list[int]
    nodes: list[int]  # rows of the slot, root included
    finish: list[int]
    bad: list[bool]
    tokens: list[list[int]]  # [S, A]
    logprobs: list[list[float]]
    raw_logprobs: list[list[float]]
    sources: list[list[int]]  # of each committed token: the drafted node it matched, ROOT if none
    top: tuple[list, list] | None  # token and probability lists [S, A, 8], where asked for
    step: int = 0  # of the call, from 1
    trees: Trees | None = None  # where asked for

    @classmethod
    def of(cls, owners: list, pool: Pool, verdict: Verdict, slots: Slots, top: bool) -> "Record":
        row = verdict.accept_row.clamp(min=0).long()
        sample = verdict.sample[row]
        # token i of the path was drafted as row i + 1; the last one was sampled off the tree
        following = torch.nn.functional.pad(row[:, 1:], (0, 1))
        place = torch.arange(row.shape[1], device=row.device)
        drafted = place + 1 < verdict.accept_count[:, None]
        source = torch.where(drafted, pool.source[following], 0)
        pick = None
        if top:
            pick = verdict.top_token[row].tolist(), verdict.top_prob[row].tolist()
        return cls(
            owners=list(owners),
            count=verdict.accept_count.tolist(),
            nodes=pool.slot_nodes.tolist(),
            finish=verdict.finish.tolist(),
            bad=verdict.bad.tolist(),
            tokens=sample.tolist(),
            logprobs=verdict.logprob[row].tolist(),
            raw_logprobs=verdict.raw_logprob[row].tolist(),
            sources=source.tolist(),
            top=pick,
        )
