"""Host edits of the slots, made between steps."""

import torch

from csd.job import Job
from csd.kernels.advance import mark_seen
from csd.slots import Slots


def fill_slot(slots: Slots, s: int, job: Job, index: int) -> None:
    """Put sample `index` of `job` into slot s, at its prompt's last token."""
    params = job.params
    context = slots.context.shape[1]
    tail = job.prompt[-context:][::-1]
    slots.context[s] = -1
    slots.context[s, : len(tail)] = torch.tensor(tail, dtype=torch.int32)
    slots.group[s] = job.group
    slots.key[s] = job.key
    slots.sample[s] = index
    slots.generated[s] = 0
    slots.step[s] = 0
    slots.temperature[s] = params.temperature
    slots.top_k[s] = params.top_k
    slots.top_p[s] = params.top_p
    slots.min_p[s] = params.min_p
    slots.penalty[s] = params.repetition_penalty
    slots.max_new[s] = params.max_new_tokens
    slots.min_new[s] = params.min_new_tokens
    _set_ids(slots.stop_ids[s], params.stopping_ids)
    _set_ids(slots.ban_ids[s], params.end_ids)
    if params.repetition_penalty != 1:
        slots.seen[s] = 0
        every = torch.tensor(sorted(set(job.prompt)), device=slots.seen.device)
        mark_seen(slots.seen[s : s + 1], every[None])
    slots.live[s] = True


def clear_slot(slots: Slots, s: int) -> None:
    slots.live[s] = False
    slots.group[s] = -1
    slots.penalty[s] = 1


def _set_ids(row: torch.Tensor, ids: tuple[int, ...]) -> None:
    row.fill_(-1)
    if ids:
        row[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
