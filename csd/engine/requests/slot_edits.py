"""Edits of the slots' tensors by the host, between steps."""

from dataclasses import dataclass

import numpy as np
import torch

from csd.engine.requests.request import Request
from csd.kernels.texts.reference import first_of
from csd.state.filters import FILTERS
from csd.state.slots import MAX_STOP_IDS, Slots
from csd.utils.device import upload


@dataclass(frozen=True, slots=True)
class Refill:
    """Assignment of a request's sample `index` to a slot and pages."""

    slot: int
    request: Request
    index: int
    pages: list[int]


def fill_slots(slots: Slots, slot_pages: torch.Tensor, refills: list[Refill]) -> None:
    """Put samples into slots, at their prompts' last tokens; slot_pages: [S, SP] int32, written.

    All values reach the device in one asynchronous copy.
    """
    if not refills:
        return
    context = slots.context.shape[1]
    params = [r.request.params for r in refills]
    values: dict[str, list] = {
        "live": [True] * len(refills),
        "group": [r.request.place.group for r in refills],
        "key": [r.request.key for r in refills],
        "sample": [r.index for r in refills],
        "generated": [0] * len(refills),
        "context": [_padded(r.request.prompt[-context:][::-1], context) for r in refills],
        "step": [0] * len(refills),
        "max_new": [x.max_new_tokens for x in params],
        "min_new": [x.min_new_tokens for x in params],
        "stop_ids": [_padded(x.end_ids, MAX_STOP_IDS) for x in params],
        "ban_ids": [_padded(x.end_ids, MAX_STOP_IDS) for x in params],
    }
    values |= {name: [getattr(x, name) for x in params] for name in FILTERS}
    rows = [(getattr(slots, name), rows) for name, rows in values.items()]
    rows.append((slot_pages, [_padded(r.pages, slot_pages.shape[1]) for r in refills]))
    index = [r.slot for r in refills]
    write_rows([(field, index, torch.tensor(column, dtype=field.dtype)) for field, column in rows])
    penalised = [r for r in refills if r.request.params.repetition_penalty != 1]
    if penalised:
        words = torch.stack([seen_words(r.request.prompt, slots.seen.shape[1]) for r in penalised])
        write_rows([(slots.seen, [r.slot for r in penalised], words)])


def join_classes(slots: Slots, filled: list[int], texts: list[int]) -> None:
    """Set the leaders of slots whose samples begin: equal for equal texts (`csd/kernels/texts`).

    filled: slots that have new samples. Others that had one of them as their leader get another.
    texts: [S], a number of each slot's prompt, any number for free slots.
    """
    every = torch.arange(slots.count, device=slots.live.device)
    new = torch.zeros(slots.count, dtype=torch.bool)
    new[filled] = True
    new, text = upload(new, slots.live.device), upload(torch.tensor(texts), slots.live.device)
    left = slots.live & ~new & new[slots.leader.clamp(min=0).long()]
    same = left[:, None] & left & (slots.leader[:, None] == slots.leader)
    leader = torch.where(left, first_of(same), slots.leader)
    begins = slots.live & (slots.generated == 0)
    same = begins[:, None] & begins & (text[:, None] == text)
    leader = torch.where(new, every, leader)
    slots.leader.copy_(torch.where(begins, first_of(same), leader))


def clear_slot(slots: Slots, s: int) -> None:
    # fill_, since x[s] = value would synchronize with the device
    slots.live[s].fill_(False)
    slots.group[s].fill_(-1)
    slots.repetition_penalty[s].fill_(1)


def seen_words(tokens: list[int], words: int) -> torch.Tensor:
    """Bitmap [words] int32 of `tokens`: bit t % 32 of word t // 32 is set for token t."""
    seen = np.zeros(32 * words, dtype=bool)
    seen[tokens] = True
    return torch.from_numpy(np.packbits(seen, bitorder="little").view("<i4"))


def _padded(ids: list[int] | tuple[int, ...], width: int) -> list[int]:
    return [*ids, *[-1] * (width - len(ids))]


def write_rows(edits: list[tuple[torch.Tensor, list[int], torch.Tensor]]) -> None:
    """field[rows] = values for each (field [S, ..], rows, values [len(rows), ..] on the host).

    All edits have the same rows, and reach the device in one copy.
    """
    device = edits[0][0].device
    rows = torch.tensor(edits[0][1])
    # the widest dtype first, so that each part is aligned
    edits = sorted(edits, key=lambda edit: -edit[2].itemsize)
    parts = [rows, *[values for _, _, values in edits]]
    packed = torch.cat([x.reshape(-1).view(torch.uint8) for x in parts])
    split = upload(packed, device).split([x.nbytes for x in parts])
    rows = split[0].view(torch.int64)
    for (field, _, values), part in zip(edits, split[1:], strict=True):
        field.index_copy_(0, rows, part.view(values.dtype).view(values.shape))
