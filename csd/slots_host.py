"""Host edits of the slots, made between steps."""

from dataclasses import dataclass

import numpy as np
import torch

from csd.device import upload
from csd.job import Job
from csd.slots import MAX_STOP_IDS, Slots


@dataclass(frozen=True, slots=True)
class Placed:
    """Sample `index` of a job, and the slot and the pages it gets."""

    slot: int
    job: Job
    index: int
    pages: list[int]


def fill_slots(slots: Slots, slot_pages: torch.Tensor, placed: list[Placed]) -> None:
    """Put samples into slots, at their prompts' last tokens; slot_pages: [S, SP] int32, written.

    All of it goes to the device in one copy, however many there are, and the host waits for none.
    """
    if not placed:
        return
    context = slots.context.shape[1]
    params = [p.job.params for p in placed]
    values: dict[str, list] = {
        "live": [True] * len(placed),
        "group": [p.job.group for p in placed],
        "key": [p.job.key for p in placed],
        "sample": [p.index for p in placed],
        "generated": [0] * len(placed),
        "context": [_padded(p.job.prompt[-context:][::-1], context) for p in placed],
        "step": [0] * len(placed),
        "temperature": [x.temperature for x in params],
        "top_k": [x.top_k for x in params],
        "top_p": [x.top_p for x in params],
        "min_p": [x.min_p for x in params],
        "penalty": [x.repetition_penalty for x in params],
        "max_new": [x.max_new_tokens for x in params],
        "min_new": [x.min_new_tokens for x in params],
        "stop_ids": [_padded(x.stopping_ids, MAX_STOP_IDS) for x in params],
        "ban_ids": [_padded(x.end_ids, MAX_STOP_IDS) for x in params],
    }
    rows = [(getattr(slots, name), rows) for name, rows in values.items()]
    rows.append((slot_pages, [_padded(p.pages, slot_pages.shape[1]) for p in placed]))
    at = [p.slot for p in placed]
    _write([(field, at, torch.tensor(found, dtype=field.dtype)) for field, found in rows])
    watched = [p for p in placed if p.job.params.repetition_penalty != 1]
    if watched:
        words = torch.stack([seen_words(p.job.prompt, slots.seen.shape[1]) for p in watched])
        _write([(slots.seen, [p.slot for p in watched], words)])


def clear_slot(slots: Slots, s: int) -> None:
    # x[s] = value would wait for the device
    slots.live[s].fill_(False)
    slots.group[s].fill_(-1)
    slots.penalty[s].fill_(1)


def seen_words(tokens: list[int], words: int) -> torch.Tensor:
    """[words] int32, the bitmap of `tokens`: bit t % 32 of word t // 32."""
    seen = np.zeros(32 * words, dtype=bool)
    seen[tokens] = True
    return torch.from_numpy(np.packbits(seen, bitorder="little").view("<i4"))


def _padded(ids: list[int] | tuple[int, ...], width: int) -> list[int]:
    return [*ids, *[-1] * (width - len(ids))]


def _write(edits: list[tuple[torch.Tensor, list[int], torch.Tensor]]) -> None:
    """field[rows] = values for each (field [S, ..], rows, values [len(rows), ..] on the host)."""
    device = edits[0][0].device
    rows = torch.tensor(edits[0][1])
    # the widest first, so that each part is aligned
    edits = sorted(edits, key=lambda edit: -edit[2].itemsize)
    parts = [rows, *[values for _, _, values in edits]]
    packed = torch.cat([x.reshape(-1).view(torch.uint8) for x in parts])
    split = upload(packed, device).split([x.nbytes for x in parts])
    rows = split[0].view(torch.int64)
    for (field, _, values), part in zip(edits, split[1:], strict=True):
        field.index_copy_(0, rows, part.view(values.dtype).view(values.shape))
